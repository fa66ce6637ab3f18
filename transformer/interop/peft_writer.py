"""Write a LoRA adapter in PEFT's format (`transformer.interop.peft_format`)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from transformer.interop.family import Family
from transformer.interop.fields import InteropError
from transformer.interop.model_tensors import model_leaves, model_tensors
from transformer.interop.peft_format import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ROOT,
    Factors,
    check_module,
    factor_leaf,
    is_input_first,
    leaf_path,
    module_name,
    outputs_shape,
)
from transformer.interop.pretrained import express
from transformer.interop.safetensors_file import WEIGHT_DTYPES, TensorSpec, write_safetensors
from transformer.interop.strided_copy import Array
from transformer.interop.weight_map import Tensor
from transformer.lora import A, B, LoRALayout
from transformer.models.model import Model

TASK_TYPES: Mapping[str, str] = {
    "language_model": "CAUSAL_LM",
    "classifier": "SEQ_CLS",
    "tagger": "TOKEN_CLS",
    "encoder_decoder": "SEQ_2_SEQ_LM",
}
"""`task_type` of PEFT for each kind of model that it has one for."""


def write_adapter(
    folder: str | Path,
    model: Model,
    layout: LoRALayout,
    trainable: Any,
    *,
    family: str = "",
    dtype: str = "float32",
    base_model: str = "",
) -> Family:
    """Write a LoRA adapter so that `peft.PeftModel.from_pretrained` opens it.

    Args:
      folder: Existing folder.
      model: The model.
      layout: Its layout.
      trainable: The trainable tree.
      family: `model_type` of the base model; default: the first that can express the model.
      dtype: Dtype of the file.
      base_model: `base_model_name_or_path`: where PEFT finds the base model by itself.

    Returns:
      The family that modules are named after.

    Raises:
      InteropError: No family can express the model, or PEFT's format has no place for a part of the
        adapter; the message names it.
    """
    folder = Path(folder)
    if dtype not in WEIGHT_DTYPES:
        raise InteropError(f"dtype {dtype}: is not known; give one of {', '.join(WEIGHT_DTYPES)}")
    chosen, architecture, _ = express(model, family)
    tensors = model_tensors(chosen, architecture, model, model_leaves(model))
    arrays = {"/".join(path): np.asarray(x) for path, x in flatten_dict(trainable).items()}
    adapted = {
        module_name(tensor): tensor
        for tensor in tensors
        if any(leaf_path(leaf) in layout.adapted for leaf in tensor.leaves)
    }
    suffixes = _shortest_suffixes(adapted, {module_name(each) for each in tensors})
    # PEFT has one rank for all modules of a suffix: one layer alone may have equal factors.
    stacked = {
        suffixes[module]
        for module, tensor in adapted.items()
        if not _has_shared_rows(tensor, layout, arrays)
    }
    updates = {
        module: (tensor, _join(tensor, layout, arrays, share_rows=suffixes[module] not in stacked))
        for module, tensor in adapted.items()
    }
    whole_modules = _whole_modules(tensors, layout, arrays)
    values: dict[str, Array] = {}
    for module, (_, factors) in updates.items():
        values[f"{ROOT}{module}.lora_A.weight"] = factors.a
        values[f"{ROOT}{module}.lora_B.weight"] = factors.b
    for module, parts in whole_modules.items():
        values |= {f"{ROOT}{module}.{name}": array for name, array in parts.items()}
    alpha = layout.scale * layout.rank
    larger = {
        suffixes[module]: factors.a.shape[0]
        for module, (_, factors) in updates.items()
        if factors.a.shape[0] != layout.rank
    }
    needs_head = architecture.kind in ("classifier", "tagger")
    config = {
        "peft_type": "LORA",
        # PEFT expects the head of these tasks in the file.
        "task_type": None
        if needs_head and not whole_modules
        else TASK_TYPES.get(architecture.kind),
        "base_model_name_or_path": base_model or None,
        "r": layout.rank,
        "lora_alpha": _as_number(alpha),
        "target_modules": sorted(set(suffixes.values())),
        "rank_pattern": larger,
        "alpha_pattern": {name: _as_number(layout.scale * rank) for name, rank in larger.items()},
        "modules_to_save": _modules_to_save(whole_modules, tensors) or None,
        "fan_in_fan_out": any(is_input_first(tensor) for tensor, _ in updates.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    specs = [TensorSpec(name, array.shape, dtype) for name, array in values.items()]
    write_safetensors(folder / ADAPTER_WEIGHTS, specs, values.__getitem__)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return chosen


def _as_number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _shortest_suffixes(adapted: Iterable[str], modules: set[str]) -> dict[str, str]:
    """Return the shortest end of each adapted module's name that no other module has.

    PEFT adapts every module whose name ends in a target, and `c_proj` is in attention and in the
    feed-forward layer of GPT-2.
    """
    adapted = set(adapted)
    others = modules - adapted

    def suffix(module: str) -> str:
        parts = module.split(".")
        for count in range(1, len(parts)):
            end = ".".join(parts[-count:])
            if not any(other.endswith(f".{end}") or other == end for other in others):
                return end
        return module

    return {module: suffix(module) for module in adapted}


def _adapted_rows(
    tensor: Tensor, layout: LoRALayout, arrays: Mapping[str, Array]
) -> list[Array]:  # each [rank, inputs]
    """Return A of each adapted matrix in a module."""
    index, rank = tensor.indices[0], layout.rank
    return [
        arrays[f"{leaf.path}/{A}"][index].reshape(leaf.inputs, rank).T
        for leaf in tensor.leaves
        if leaf_path(leaf) in layout.adapted
    ]


def _has_shared_rows(tensor: Tensor, layout: LoRALayout, arrays: Mapping[str, Array]) -> bool:
    first, *others = _adapted_rows(tensor, layout, arrays)
    return all(np.array_equal(first, each) for each in others)


def _join(
    tensor: Tensor, layout: LoRALayout, arrays: Mapping[str, Array], *, share_rows: bool
) -> Factors:
    """Return the update of a module from those of the matrices in it.

    Args:
      tensor: The module's matrix.
      layout: The adapter.
      arrays: Its factors.
      share_rows: The matrices have one A, which is written once. False: theirs are stacked.
    """
    check_module(tensor)
    index, rank = tensor.indices[0], layout.rank
    adapted = [leaf for leaf in tensor.leaves if leaf_path(leaf) in layout.adapted]
    rows = _adapted_rows(tensor, layout, arrays)
    total = rank if share_rows else rank * len(rows)
    columns = []
    for leaf in tensor.leaves:
        b = np.zeros((total, *outputs_shape(leaf)), np.float32)
        if leaf in adapted:
            start = 0 if share_rows else rank * adapted.index(leaf)
            b[start : start + rank] = arrays[f"{leaf.path}/{B}"][index]
        columns.append(b)
    joined = tensor.layout.join(columns, [factor_leaf(leaf, total) for leaf in tensor.leaves])
    return Factors(
        rows[0] if share_rows else np.concatenate(rows),
        joined.T if is_input_first(tensor) else joined,
    )


def _whole_modules(
    tensors: Sequence[Tensor], layout: LoRALayout, arrays: Mapping[str, Array]
) -> dict[str, dict[str, Array]]:
    """Return the modules that are trained in full: their tensors by the last part of the name."""
    is_trained = {
        tensor.name: all(leaf_path(leaf) in layout.trained for leaf in tensor.leaves)
        for tensor in tensors
    }
    modules: dict[str, dict[str, Array]] = {}
    for tensor in tensors:
        partly = [leaf.path for leaf in tensor.leaves if leaf_path(leaf) in layout.trained]
        siblings = [each.name for each in tensors if module_name(each) == module_name(tensor)]
        if not partly:
            continue
        left = [name for name in siblings if not is_trained[name]]
        if left or not is_trained[tensor.name]:
            raise InteropError(
                f"lora.train_fully {partly[0]}: PEFT saves whole modules, and "
                f"{(left or [tensor.name])[0]} is not trained; name it too, or merge the adapter "
                "and export the whole model"
            )
        if "embedding" in partly and not any(each.leaves[0].path == "output" for each in tensors):
            raise InteropError(
                "lora.train_fully embedding: is the output matrix too, which PEFT cannot save as "
                "one module; merge the adapter and export the whole model"
            )
        units = [
            np.asarray(arrays[leaf.path][tensor.indices[0]])[tuple(map(slice, leaf.unit_shape))]
            for leaf in tensor.leaves
        ]
        name = tensor.name.rpartition(".")[2]
        modules.setdefault(module_name(tensor), {})[name] = tensor.layout.join(units, tensor.leaves)
    return modules


def _modules_to_save(whole_modules: Iterable[str], tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the modules that are trained in full.

    A head of several layers (RoBERTa's `classifier`) is one module, which PEFT wraps by itself.
    """
    modules = {module_name(tensor) for tensor in tensors}
    trained = set(whole_modules)
    heads = {module.partition(".")[0] for module in trained}
    complete = {
        head for head in heads if {m for m in modules if m.partition(".")[0] == head} <= trained
    }
    return sorted({head if (head := m.partition(".")[0]) in complete else m for m in trained})

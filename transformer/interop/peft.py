"""LoRA adapters in PEFT's format.

A folder has `adapter_config.json` and `adapter_model.safetensors`. PEFT names modules as the model
of `transformers` does, and keeps for each adapted one `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. It adds (alpha / rank) B A to the module's matrix.

One module may hold several matrices of this library, side by side: the queries, keys and values of
GPT-2's `c_attn`. Their updates are written as one of a larger rank: A has the rows of all of them,
and B is block-diagonal. `rank_pattern` and `alpha_pattern` say so to PEFT. In the other direction
each matrix takes A and its own rows of B.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.interop.families import express
from transformer.interop.family import Family
from transformer.interop.fields import InteropError
from transformer.interop.weight_files import (
    WEIGHT_DTYPES,
    StoredTensor,
    open_safetensors,
    read_json,
    write_safetensors,
)
from transformer.interop.weight_map import (
    Array,
    AsIs,
    Depthwise,
    Leaf,
    Linear,
    Tensor,
    model_leaves,
    model_tensors,
)
from transformer.layers.logical_axes import LogicalAxes
from transformer.lora import (
    FACTOR_A,
    FACTOR_B,
    RANK_AXIS,
    TARGET_GROUPS,
    LoRALayout,
    is_adaptable,
    matrix_name,
)
from transformer.models.model import Model

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

ROOT = "base_model.model."
"""Prefix of every name in an adapter's file."""

EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Fields of adapter_config.json that change what an adapter computes, with the values that are
supported. Other initializations (PiSSA, OLoRA, CorDA, LoftQ) change the base weights too."""

WITHOUT_EFFECT = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "lora_dropout", "inference_mode", "task_type", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "runtime_config"),
    *("megatron_core", "ensure_weight_tying", "qalora_group_size"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),
)
"""Fields that need no check: the shapes and names of the tensors say the same, or only training
with PEFT reads them (`lora_dropout`). Any other field must be off."""

TASK_TYPES: Mapping[str, str] = {
    "language_model": "CAUSAL_LM",
    "classifier": "SEQ_CLS",
    "tagger": "TOKEN_CLS",
    "encoder_decoder": "SEQ_2_SEQ_LM",
}
"""`task_type` of PEFT for each kind of model that it has one for."""

MAX_ALPHA = 1e9


# What a module holds.


def _module_name(tensor: Tensor) -> str:
    return tensor.name.rpartition(".")[0]


def _is_input_first(tensor: Tensor) -> bool:
    """Return True for a matrix [inputs, outputs] (GPT-2's `Conv1D`)."""
    return isinstance(tensor.layout, Linear) and not tensor.layout.transposed


def _check_module(tensor: Tensor) -> None:
    if tensor.leaves[0].axes.stack != ("layers",) or isinstance(tensor.layout, AsIs | Depthwise):
        raise InteropError(
            f"{tensor.leaves[0].path}: is not a separate linear layer in transformers, and "
            "PEFT adapts only those; merge the adapter and export the whole model"
        )


def _input_shape(leaf: Leaf) -> tuple[int, ...]:
    return leaf.unit_shape[: len(leaf.axes.inputs)]


def _output_shape(leaf: Leaf) -> tuple[int, ...]:
    return leaf.unit_shape[len(leaf.axes.inputs) :]


def _leaf_of_b(leaf: Leaf, rank: int) -> Leaf:
    """Return B of a matrix as a leaf: the rank takes the place of the inputs."""
    shape = (*leaf.shape[: leaf.num_stacked], rank, *_output_shape(leaf))
    axes = LogicalAxes(leaf.axes.stack, (RANK_AXIS,), leaf.axes.outputs)
    return leaf._replace(axes=axes, shape=shape, padded_shape=shape)


# Reading.


class Adapter(NamedTuple):
    """LoRA adapter of a model, read from a folder."""

    layout: LoRALayout
    alpha: float
    targets: tuple[str, ...]
    """Targets of the layout: names of matrices."""
    trained: tuple[str, ...]
    """Tree paths of the parameters that the adapter replaces whole."""
    trainable: Any
    """Tree of NumPy arrays as `LoRALayout.init` returns it."""


class Factors(NamedTuple):
    """Update of one module, or of one matrix of it."""

    a: Array  # [rank, inputs]; of one matrix: [*inputs, rank]
    b: Array  # [outputs, rank]; of one matrix: [rank, *outputs]


def read_adapter(folder: str | Path, model: Model, *, family: str = "") -> Adapter:
    """Read a LoRA adapter for a model.

    Args:
      folder: Folder of PEFT.
      model: The base model.
      family: `model_type` that modules are named after; default: the first that can express the
        model.

    Raises:
      InteropError: A file is missing or damaged, a field has a value that is not supported, or a
        module does not exist in this model or has another shape there.
    """
    config_path, path = Path(folder) / ADAPTER_CONFIG, Path(folder) / ADAPTER_WEIGHTS
    config = read_json(config_path)
    _check_config(config, config_path)
    rank = config["r"]
    scale = _scale(config["lora_alpha"], rank, config)
    stored = open_safetensors(path)
    chosen, architecture, _ = express(model, family)
    leaves = model_leaves(model)
    tensors = model_tensors(chosen.rules(architecture), leaves, model.config)
    updates, whole = _sort_tensors(stored, tensors, path, chosen.model_type)
    factors: dict[str, dict[tuple[int, ...], Factors]] = {}
    adapted: set[str] = set()
    for tensor, update in updates:
        parts = list(_split(tensor, update, rank, config_path))
        module_scale = _scale(_alpha_of(_module_name(tensor), config), len(update.a), config)
        if not math.isclose(module_scale, scale, rel_tol=1e-6):
            raise InteropError(
                f"{config_path}: alpha_pattern scales {_module_name(tensor)} by {module_scale:g} "
                f"and others by {scale:g}, and this library has one scale; train the adapter again "
                "without patterns"
            )
        for leaf, part in zip(tensor.leaves, parts, strict=True):
            factors.setdefault(leaf.path, {})[tensor.index] = part
    for tensor, _ in updates:
        # Not the matrices whose rows of a shared B are all zero, unless all of them are.
        paths = [leaf.path for leaf in tensor.leaves]
        changed = {p for p in paths if any(np.any(part.b) for part in factors[p].values())}
        adapted |= changed or set(paths)
    names = {matrix_name(tuple(p.split("/"))) for p in adapted}
    targets = tuple(name for name in TARGET_GROUPS["all"] if name in names)
    trained = _whole_parameters(whole, leaves)
    layout = LoRALayout.create(
        model.logical_axes(), rank=rank, alpha=scale * rank, targets=targets, trained=trained
    )
    trainable = dict(trained)
    for key in layout.adapted:
        leaf = leaves["/".join(key)]
        # Layers that the adapter leaves out have zeros. Their gradients are zero too, so that they
        # stay as they are in training.
        a = np.zeros((*leaf.shape[: leaf.num_stacked], *_input_shape(leaf), rank), np.float32)
        b = np.zeros(_leaf_of_b(leaf, rank).shape, np.float32)
        for index, part in factors.get(leaf.path, {}).items():
            a[index], b[index] = part
        trainable |= {f"{leaf.path}/{FACTOR_A}": a, f"{leaf.path}/{FACTOR_B}": b}
    tree = unflatten_dict(trainable, sep="/")
    return Adapter(layout, scale * rank, targets, tuple(trained), tree)


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    for name, values in EXPECTED.items():
        if name in config and config[name] not in values:
            raise InteropError(
                f"{path}: {name} {config[name]!r} is not supported; give an adapter with "
                f"{name} {values[0]!r}"
            )
    for name, value in config.items():
        if value and name not in EXPECTED and name not in WITHOUT_EFFECT:
            raise InteropError(
                f"{path}: {name} {value!r} is not supported; give an adapter of plain LoRA"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 0 < rank < 2**31 or not _is_alpha(alpha):
        raise InteropError(
            f"{path}: r {rank!r} and lora_alpha {alpha!r} are not a valid rank and scale; "
            "fetch it again"
        )
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise InteropError(f"{path}: alpha_pattern is not an object of names; fetch it again")
    for name, alpha in patterns.items():
        # PEFT allows regular expressions, of which some keep Python's `re` busy forever.
        if not re.fullmatch(r"[\w.-]+", name) or not _is_alpha(alpha):
            raise InteropError(
                f"{path}: alpha_pattern {name[:100]!r} is not the name of a module with a number; "
                "write the names of modules in full"
            )


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < MAX_ALPHA


def _alpha_of(module: str, config: Mapping[str, Any]) -> float:
    """Return the alpha of a module: by PEFT's rule that of the first name that it ends in."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alphas = (patterns[name] for name in patterns if f".{module}".endswith(f".{name}"))
    return next(alphas, config["lora_alpha"])


def _scale(alpha: float, rank: int, config: Mapping[str, Any]) -> float:
    # rsLoRA (Kalajdzievski 2023) divides by the root of the rank.
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _sort_tensors(
    stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], path: Path, model_type: str
) -> tuple[list[tuple[Tensor, Factors]], list[tuple[Tensor, StoredTensor]]]:
    """Return the updates of modules, and the tensors of modules that are replaced whole."""
    pairs: dict[str, dict[str, Array]] = {}
    whole: list[tuple[Tensor, StoredTensor]] = []
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(ROOT)
        if match := re.fullmatch(r"(.+)\.lora_(A|B)\.weight", name):
            pairs.setdefault(match[1], {})[match[2]] = np.asarray(tensor.read(), np.float32)
        elif "lora_" in name or name not in tensors:
            raise InteropError(
                f"{path}: {stored_name} is not an update of a linear layer of this {model_type} "
                "model; give the base model that the adapter was trained on"
            )
        else:
            whole.append((tensors[name], tensor))
    if not pairs:
        raise InteropError(f"{path}: has no lora_A and lora_B; fetch the adapter again")
    updates = []
    for module, pair in sorted(pairs.items()):
        target = tensors.get(f"{module}.weight")
        if target is None:
            raise InteropError(
                f"{path}: adapts {module}, which this {model_type} model does not have; give "
                "the base model that the adapter was trained on"
            )
        if not all(is_adaptable(tuple(leaf.path.split("/")), leaf.axes) for leaf in target.leaves):
            raise InteropError(
                f"{path}: adapts {module}, and LoRA here adapts only matrices of layers; "
                "train the adapter again without that module"
            )
        _check_module(target)
        if len(pair) < 2:
            raise InteropError(f"{path}: has one of two factors of {module}; fetch it again")
        outputs, inputs = target.shape[::-1] if _is_input_first(target) else target.shape
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or a.shape[1] != inputs or b.shape != (outputs, a.shape[0]):
            raise InteropError(
                f"{path}: factors {list(a.shape)} and {list(b.shape)} of {module} do not fit "
                f"its {outputs} outputs and {inputs} inputs; give the base model that the adapter "
                "was trained on"
            )
        updates.append((target, Factors(a, b)))
    return updates, whole


def _split(tensor: Tensor, factors: Factors, rank: int, path: Path) -> Iterator[Factors]:
    """Yield the update of each matrix in a module, with the rank of the adapter."""
    total = len(factors.a)
    b = factors.b.T if _is_input_first(tensor) else factors.b
    parts = tensor.layout.split(b, [_leaf_of_b(leaf, total) for leaf in tensor.leaves])
    for leaf, part in zip(tensor.leaves, parts, strict=True):
        # Columns of zeros: the blocks of the other matrices.
        used = np.flatnonzero(np.any(part.reshape(total, -1) != 0, axis=1))
        unused = np.setdiff1d(np.arange(total), used)
        if total < rank or len(used) > rank:
            raise InteropError(
                f"{path}: rank_pattern gives {_module_name(tensor)} rank {total} and others "
                f"{rank}, and this library has one rank; train the adapter again without patterns"
            )
        chosen = np.sort(np.concatenate([used, unused[: rank - len(used)]]))
        yield Factors(factors.a[chosen].T.reshape(*_input_shape(leaf), rank), part[chosen])


def _whole_parameters(
    whole: Sequence[tuple[Tensor, StoredTensor]], leaves: Mapping[str, Leaf]
) -> dict[str, Array]:
    """Return the parameters that an adapter replaces, by tree path."""
    units: dict[str, dict[tuple[int, ...], Array]] = {}
    for tensor, stored in whole:
        if stored.shape != tensor.shape:
            raise InteropError(
                f"{stored.path}: {stored.name} has shape {list(stored.shape)}, and the model's "
                f"is {list(tensor.shape)}; give the base model that the adapter was trained on"
            )
        parts = tensor.layout.split(np.asarray(stored.read(), np.float32), tensor.leaves)
        for leaf, part in zip(tensor.leaves, parts, strict=True):
            units.setdefault(leaf.path, {})[tensor.index] = part
    parameters = {}
    for path, units_by_index in units.items():
        leaf = leaves[path]
        if len(units_by_index) < math.prod(leaf.shape[: leaf.num_stacked]):
            raise InteropError(
                f"{whole[0][1].path}: replaces {path} in only some layers; train the adapter again "
                "with all of them, or none"
            )
        parameters[path] = np.zeros(leaf.padded_shape, np.float32)
        for index, unit in units_by_index.items():
            parameters[path][index][tuple(map(slice, unit.shape))] = unit
    return parameters


# Writing.


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
    if dtype not in WEIGHT_DTYPES:
        raise InteropError(f"dtype {dtype}: is not known; give one of {', '.join(WEIGHT_DTYPES)}")
    chosen, architecture, _ = express(model, family)
    by_name = model_tensors(chosen.rules(architecture), model_leaves(model), model.config)
    tensors = list(by_name.values())
    arrays = {name: np.asarray(x) for name, x in flatten_dict(trainable, sep="/").items()}
    adapted = {
        _module_name(tensor): tensor
        for tensor in tensors
        if any(f"{leaf.path}/{FACTOR_A}" in arrays for leaf in tensor.leaves)
    }
    suffixes = _shortest_suffixes(set(adapted), {_module_name(tensor) for tensor in tensors})
    rows = {module: _rows_of_a(tensor, arrays) for module, tensor in adapted.items()}
    # PEFT has one rank for all modules of a suffix: one layer alone may have equal factors.
    stacked = {
        suffixes[module]
        for module, (first, *others) in rows.items()
        if not all(np.array_equal(first, other) for other in others)
    }
    values: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    for module, tensor in adapted.items():
        suffix = suffixes[module]
        a = np.concatenate(rows[module]) if suffix in stacked else rows[module][0]
        values[f"{ROOT}{module}.lora_A.weight"] = a
        values[f"{ROOT}{module}.lora_B.weight"] = _join_b(tensor, arrays, len(a))
        ranks[suffix] = len(a)
    whole_modules = _whole_modules(tensors, arrays)
    for tensor in tensors:
        if _module_name(tensor) in whole_modules:
            values[ROOT + tensor.name] = tensor.join(arrays)
    larger = {suffix: rank for suffix, rank in ranks.items() if rank != layout.rank}
    needs_head = architecture.kind in ("classifier", "tagger")
    config = {
        "peft_type": "LORA",
        # PEFT expects the head of these tasks in the file.
        "task_type": None
        if needs_head and not whole_modules
        else TASK_TYPES.get(architecture.kind),
        "base_model_name_or_path": base_model or None,
        "r": layout.rank,
        "lora_alpha": _as_number(layout.scale * layout.rank),
        "target_modules": sorted(ranks),
        "rank_pattern": larger,
        "alpha_pattern": {name: _as_number(layout.scale * rank) for name, rank in larger.items()},
        "modules_to_save": _modules_to_save(whole_modules, tensors) or None,
        "fan_in_fan_out": any(_is_input_first(tensor) for tensor in adapted.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    shapes = {name: array.shape for name, array in values.items()}
    write_safetensors(Path(folder) / ADAPTER_WEIGHTS, shapes, dtype, values.__getitem__)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (Path(folder) / ADAPTER_CONFIG).write_text(text)
    return chosen


def _as_number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _shortest_suffixes(adapted: set[str], modules: set[str]) -> dict[str, str]:
    """Return the shortest end of each adapted module's name that no other module has.

    PEFT adapts every module whose name ends in a target, and `c_proj` is in attention and in the
    feed-forward layer of GPT-2.
    """
    others = [f".{module}" for module in modules - adapted]

    def suffix(module: str) -> str:
        parts = module.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        alone = (end for end in ends if not any(other.endswith(f".{end}") for other in others))
        return next(alone, module)

    return {module: suffix(module) for module in adapted}


def _rows_of_a(
    tensor: Tensor, arrays: Mapping[str, Array]
) -> list[Array]:  # of each adapted matrix in the module: [rank, inputs]
    _check_module(tensor)
    factors = [
        arrays[f"{x.path}/{FACTOR_A}"] for x in tensor.leaves if f"{x.path}/{FACTOR_A}" in arrays
    ]
    return [a[tensor.index].reshape(-1, a.shape[-1]).T for a in factors]


def _join_b(
    tensor: Tensor,
    arrays: Mapping[str, Array],
    total: int,  # rank of the module: that of its matrices if they share A, else the sum
) -> Array:  # [outputs, rank]
    columns, start = [], 0
    for leaf in tensor.leaves:
        column = np.zeros((total, *_output_shape(leaf)), np.float32)
        if f"{leaf.path}/{FACTOR_B}" in arrays:
            b = arrays[f"{leaf.path}/{FACTOR_B}"][tensor.index]
            column[start : start + len(b)] = b
            start = (start + len(b)) % total
        columns.append(column)
    joined = tensor.layout.join(columns, [_leaf_of_b(leaf, total) for leaf in tensor.leaves])
    return joined.T if _is_input_first(tensor) else joined


def _whole_modules(tensors: Sequence[Tensor], arrays: Mapping[str, Array]) -> set[str]:
    """Return the modules that are trained in full."""
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(_module_name(tensor), []).append(tensor)
    has_output = any(tensor.leaves[0].path == "output" for tensor in tensors)
    modules = set()
    for module, held in parts.items():
        trained = [leaf.path for tensor in held for leaf in tensor.leaves if leaf.path in arrays]
        if not trained:
            continue
        for tensor in held:
            if any(leaf.path not in arrays for leaf in tensor.leaves):
                raise InteropError(
                    f"lora.train_fully {trained[0]}: PEFT saves whole modules, and {tensor.name} "
                    "is not trained; name it too, or merge the adapter and export the whole model"
                )
        if "embedding" in trained and not has_output:
            raise InteropError(
                "lora.train_fully embedding: is the output matrix too, which PEFT cannot save as "
                "one module; merge the adapter and export the whole model"
            )
        modules.add(module)
    return modules


def _modules_to_save(whole_modules: set[str], tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of the modules that are trained in full.

    A head of several layers (RoBERTa's `classifier`) is one module, which PEFT wraps by itself.
    """
    untrained = {_module_name(tensor) for tensor in tensors} - whole_modules
    partly = {module.partition(".")[0] for module in untrained}
    heads = {module: module.partition(".")[0] for module in whole_modules}
    return sorted({module if heads[module] in partly else heads[module] for module in heads})

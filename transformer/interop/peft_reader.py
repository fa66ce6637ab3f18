"""Read a LoRA adapter in PEFT's format (`transformer.interop.peft_format`)."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from flax.traverse_util import unflatten_dict

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
    split_path,
)
from transformer.interop.pretrained import express
from transformer.interop.safetensors_file import SafetensorsFile
from transformer.interop.strided_copy import Array
from transformer.interop.weight_files import read_json
from transformer.interop.weight_map import Leaf, Tensor
from transformer.lora import TARGET_GROUPS, A, B, LoRALayout, is_adaptable, matrix_name
from transformer.models.model import Model

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


NAME_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|\\d\+|\.\*)*\$?")
"""Regular expressions that are read: names of modules, with `\\d+` and `.*`. Others can keep
Python's `re` busy forever."""

MAX_REPEATS = 2
"""Most `\\d+` and `.*` in one of them; all of an adapter together may have ten times as many."""

MAX_PATTERNS = 20_000

MAX_ALPHA = 1e9


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
    folder = Path(folder)
    config = read_json(folder / ADAPTER_CONFIG)
    source = str(folder / ADAPTER_CONFIG)
    rank, scale = _check_config(config, source)
    patterns = _read_patterns(config, source)
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise InteropError(f"{folder}: has no {ADAPTER_WEIGHTS}; fetch the whole adapter")
    file = SafetensorsFile(folder / ADAPTER_WEIGHTS)
    chosen, architecture, _ = express(model, family)
    leaves = model_leaves(model)
    tensors = {each.name: each for each in model_tensors(chosen, architecture, model, leaves)}
    updates, whole_tensors = _sort_tensors(file, tensors, chosen.model_type)
    factors_by_path: dict[str, dict[tuple[int, ...], Factors]] = {}
    for tensor, factors in updates:
        parts = list(_split(tensor, factors, rank, source))
        alpha = _alpha_of(module_name(tensor), patterns, config["lora_alpha"])
        own = _scale(alpha, factors.a.shape[0], config)
        if not math.isclose(own, scale, rel_tol=1e-6):
            raise InteropError(
                f"{source}: alpha_pattern scales {module_name(tensor)} by {own:g} and others by "
                f"{scale:g}, and this library has one scale; train the adapter again without "
                "patterns"
            )
        for leaf, each in zip(tensor.leaves, parts, strict=True):
            factors_by_path.setdefault(leaf.path, {})[tensor.indices[0]] = each
    adapted_paths = _adapted_paths(factors_by_path, [tensor for tensor, _ in updates])
    names = {matrix_name(split_path(path)) for path in adapted_paths}
    targets = tuple(name for name in TARGET_GROUPS["all"] if name in names)
    trained = _whole_parameters(whole_tensors, leaves, file)
    layout = LoRALayout.create(
        model.logical_axes(), rank=rank, alpha=scale * rank, targets=targets, trained=trained
    )
    trainable: dict[tuple[str, ...], Array] = {split_path(p): x for p, x in trained.items()}
    for path in layout.adapted:
        leaf = leaves["/".join(path)]
        a, b = _stack_factors(leaf, rank, factors_by_path.get(leaf.path, {}))
        trainable |= {(*path, A): a, (*path, B): b}
    return Adapter(layout, scale * rank, targets, tuple(trained), unflatten_dict(trainable))


def _check_config(config: Mapping[str, Any], source: str) -> tuple[int, float]:
    """Return the rank and the scale. Raise InteropError for what is not supported."""
    for name, values in EXPECTED.items():
        if name in config and config[name] not in values:
            raise InteropError(
                f"{source}: {name} {config[name]!r} is not supported; give an adapter with "
                f"{name} {values[0]!r}"
            )
    for name, value in config.items():
        if value and name not in EXPECTED and name not in WITHOUT_EFFECT:
            raise InteropError(
                f"{source}: {name} {value!r} is not supported; give an adapter of plain LoRA"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 0 < rank < 2**31 or not _is_alpha(alpha):
        raise InteropError(
            f"{source}: r {rank!r} and lora_alpha {alpha!r} are not a valid rank and scale; "
            "fetch it again"
        )
    return rank, _scale(alpha, rank, config)


def _is_alpha(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < MAX_ALPHA


def _scale(alpha: float, rank: int, config: Mapping[str, Any]) -> float:
    # rsLoRA (Kalajdzievski 2023) divides by the root of the rank.
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_patterns(config: Mapping[str, Any], source: str) -> list[tuple[re.Pattern[str], float]]:
    """Return the patterns of module names that have an alpha of their own.

    Raises:
      InteropError: One is not a name, or there are too many to try.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise InteropError(f"{source}: alpha_pattern is not an object of names; fetch it again")
    total = 0
    for pattern, alpha in patterns.items():
        repeats = pattern.count("*") + pattern.count("+")
        total += repeats
        allowed = NAME_PATTERN.fullmatch(pattern) and repeats <= MAX_REPEATS
        if not allowed or total > 10 * MAX_REPEATS or not _is_alpha(alpha):
            raise InteropError(
                f"{source}: alpha_pattern {pattern[:100]!r} is not the name of a module with a "
                "number; write the names of modules in full"
            )
    # By PEFT's rule: the first pattern that a name ends in.
    return [(re.compile(rf"(.*\.)?({name})"), alpha) for name, alpha in patterns.items()]


def _alpha_of(
    module: str, patterns: Sequence[tuple[re.Pattern[str], float]], default: float
) -> float:
    """Return the alpha of a module."""
    return next((alpha for pattern, alpha in patterns if pattern.fullmatch(module)), default)


def _sort_tensors(
    file: SafetensorsFile, tensors: Mapping[str, Tensor], model_type: str
) -> tuple[list[tuple[Tensor, Factors]], dict[str, Tensor]]:
    """Return the updates of modules, and the tensors of whole modules by their name in the file."""
    pairs: dict[str, dict[str, Array]] = {}
    whole_tensors: dict[str, Tensor] = {}
    for name in file.tensors:
        own = name.removeprefix(ROOT)
        if match := re.fullmatch(r"(.+)\.lora_(A|B)\.weight", own):
            pairs.setdefault(match[1], {})[match[2]] = np.asarray(file.read(name), np.float32)
        elif "lora_" in own or own not in tensors:
            raise InteropError(
                f"{file.path}: {name} is not an update of a linear layer of this {model_type} "
                "model; give the base model that the adapter was trained on"
            )
        else:
            whole_tensors[name] = tensors[own]
    updates = []
    for module, pair in sorted(pairs.items()):
        tensor = tensors.get(f"{module}.weight")
        if tensor is None:
            raise InteropError(
                f"{file.path}: adapts {module}, which this {model_type} model does not have; give "
                "the base model that the adapter was trained on"
            )
        if not all(is_adaptable(leaf_path(leaf), leaf.axes) for leaf in tensor.leaves):
            raise InteropError(
                f"{file.path}: adapts {module}, and LoRA here adapts only matrices of layers; "
                "train the adapter again without that module"
            )
        check_module(tensor)
        if len(pair) < 2:
            raise InteropError(f"{file.path}: has one of two factors of {module}; fetch it again")
        outputs, inputs = tensor.shape[::-1] if is_input_first(tensor) else tensor.shape
        a, b = pair["A"], pair["B"]
        shapes = (a.ndim == b.ndim == 2) and (a.shape[1], *b.shape) == (inputs, outputs, a.shape[0])
        if not shapes:
            raise InteropError(
                f"{file.path}: factors {list(a.shape)} and {list(b.shape)} of {module} do not fit "
                f"its {outputs} outputs and {inputs} inputs; give the base model that the adapter "
                "was trained on"
            )
        updates.append((tensor, Factors(a, b)))
    if not updates:
        raise InteropError(f"{file.path}: has no lora_A and lora_B; fetch the adapter again")
    return updates, whole_tensors


def _split(tensor: Tensor, factors: Factors, rank: int, source: str) -> Iterator[Factors]:
    """Yield the update of each matrix in a module, with the rank of the adapter."""
    total = factors.a.shape[0]
    b = factors.b.T if is_input_first(tensor) else factors.b
    parts = tensor.layout.split(b, [factor_leaf(leaf, total) for leaf in tensor.leaves])
    for leaf, part in zip(tensor.leaves, parts, strict=True):
        # Columns of zeros: the blocks of the other matrices.
        used = np.flatnonzero(np.any(part.reshape(total, -1) != 0, axis=1))
        unused = np.setdiff1d(np.arange(total), used)
        if total < rank or len(used) > rank:
            raise InteropError(
                f"{source}: rank_pattern gives {module_name(tensor)} rank {total} and others "
                f"{rank}, and this library has one rank; train the adapter again without patterns"
            )
        chosen = np.sort(np.concatenate([used, unused[: rank - len(used)]]))
        inputs = leaf.unit_shape[: len(leaf.axes.inputs)]
        yield Factors(factors.a[chosen].T.reshape(*inputs, rank), part[chosen])


def _adapted_paths(
    factors: Mapping[str, Mapping[tuple[int, ...], Factors]], tensors: Sequence[Tensor]
) -> set[str]:
    """Return the matrices that are adapted: not those whose rows of a shared B are all zero."""
    changed = {path for path, each in factors.items() if any(np.any(x.b) for x in each.values())}
    return {
        leaf.path
        for tensor in tensors
        for leaf in tensor.leaves
        if leaf.path in changed or changed.isdisjoint(each.path for each in tensor.leaves)
    }


def _stack_factors(
    leaf: Leaf, rank: int, factors_by_path: Mapping[tuple[int, ...], Factors]
) -> tuple[Array, Array]:
    """Return A and B of all layers. Layers that the adapter leaves out get zeros.

    Their gradients are zero too, so that they stay as they are in training.
    """
    stack, inputs = leaf.shape[: leaf.num_stacked], leaf.unit_shape[: len(leaf.axes.inputs)]
    a = np.zeros((*stack, *inputs, rank), np.float32)
    b = np.zeros((*stack, rank, *outputs_shape(leaf)), np.float32)
    for index, factors in factors_by_path.items():
        a[index], b[index] = factors
    return a, b


def _whole_parameters(
    whole_tensors: Mapping[str, Tensor], leaves: Mapping[str, Leaf], file: SafetensorsFile
) -> dict[str, Array]:
    """Return the parameters that an adapter replaces, by tree path."""
    arrays: dict[str, dict[tuple[int, ...], Array]] = {}
    for name, tensor in whole_tensors.items():
        if file.tensors[name].shape != tensor.shape:
            raise InteropError(
                f"{file.path}: {name} has shape {list(file.tensors[name].shape)}, and the model's "
                f"is {list(tensor.shape)}; give the base model that the adapter was trained on"
            )
        units = tensor.layout.split(np.asarray(file.read(name), np.float32), tensor.leaves)
        for leaf, unit in zip(tensor.leaves, units, strict=True):
            for index in tensor.indices:
                arrays.setdefault(leaf.path, {})[index] = unit
    parameters = {}
    for path, units_by_index in arrays.items():
        leaf = leaves[path]
        if len(units_by_index) < math.prod(leaf.shape[: leaf.num_stacked]):
            raise InteropError(
                f"{file.path}: replaces {path} in only some layers; train the adapter again with "
                "all of them, or none"
            )
        parameters[path] = np.zeros(leaf.padded_shape, np.float32)
        for index, unit in units_by_index.items():
            parameters[path][index][tuple(map(slice, unit.shape))] = unit
    return parameters

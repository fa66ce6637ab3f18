"""Packed weights of published models: GPTQ, AWQ and MXFP4 (gpt-oss), read as `QuantizedWeight`s.

| method | codes | scales | zero points |
| --- | --- | --- | --- |
| `gptq` (Frantar et al. 2022) | `qweight` [in / 8, out] | `scales` | `qzeros` [groups, out / 8] |
| `awq` (Lin et al. 2023), GEMM | `qweight` [in, out / 8] | `scales` | `qzeros` [groups, out / 8] |
| `mxfp4` | `_blocks` [E, out, groups, 16] | `_scales` [E, out, groups] | none |

The first two keep eight codes of 4 bits (GPTQ also four of 8 bits) in an int32, AWQ those of eight
outputs in the order 0 2 4 6 1 3 5 7. In the bytes of a
file, GPTQ and MXFP4 have the codes of two inputs in the order of `QuantizedWeight`: nothing is
unpacked. GPTQ with `desc_act` says by `g_idx` to which group an input belongs.
"""

import dataclasses
import mmap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer.interop.fields import InteropError
from transformer.interop.weight_map import Array, Leaf, Tensor, WholeStack
from transformer.layers.logical_axes import LogicalAxes

AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of AWQ of each of eight outputs."""

PARTS = ("codes", "scales", "zeros", "group_of_input")
"""Arrays of a `QuantizedWeight`."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the weights of a folder are packed."""

    method: Literal["gptq", "awq", "mxfp4"]
    bits: int = 4
    zero_offset: int = 0
    """What the files' zero points are less than those of the codes: 1 in the first GPTQ format."""


def read_packing(settings: Any, source: str) -> Packing:
    """Return the packing of a `quantization_config`.

    Raises:
      InteropError: It is of a kind that is not read.
    """
    settings = settings if isinstance(settings, dict) else {"quant_method": settings}
    method = settings.get("quant_method", "")

    def refuse(what: str) -> InteropError:
        return InteropError(
            f"{source}: quantization_config {what}: is not read; GPTQ of 4 or 8 bits, AWQ of 4 "
            "bits (version gemm) and MXFP4 are. Where transformers is installed, load the model "
            "unpacked, and save_pretrained it in bfloat16"
        )

    if method == "mxfp4":
        return Packing("mxfp4")
    bits = settings.get("bits", 4)
    if method == "awq":
        version = str(settings.get("version") or "gemm").lower()
        if bits != 4 or version != "gemm":
            raise refuse(f"awq of {bits} bits, version {version}")
        return Packing("awq")
    if method == "gptq":
        layout = settings.get("checkpoint_format") or "gptq"
        if bits not in (4, 8) or layout not in ("gptq", "gptq_v2") or settings.get("dynamic"):
            raise refuse(f"gptq of {bits} bits, checkpoint_format {layout}")
        return Packing("gptq", bits, zero_offset=1 if layout == "gptq" else 0)
    raise refuse(str(method))


class PackedPart(NamedTuple):
    """One array of a packed matrix, as a tensor in the orientation of the matrix's own tensor."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    convert: Callable[[], Array]
    mapped: mmap.mmap

    def read(self) -> Array:
        """Return the values."""
        return self.convert()


@dataclasses.dataclass(frozen=True)
class SharedVector:
    """Layout of a vector over the inputs, which all matrices of a tensor have in common."""

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return leaves[0].unit_shape

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf."""
        return [tensor] * len(leaves)

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        return values[0]


def unpack_tensors(
    tensors: Mapping[str, Tensor], stored: MutableMapping[str, Any], packing: Packing, folder: Path
) -> dict[str, Tensor]:
    """Return the tensors with those of the parts of a packed matrix in place of its own.

    Args:
      tensors: Tensors of the model by name.
      stored: The files' tensors by name. Those of packed matrices are replaced by their parts.
      packing: How they are packed.
      folder: Folder of the files, for errors.

    Raises:
      InteropError: A matrix is packed that is not one of a layer, or in some layers only, or parts
        are missing.
    """
    ends = ("_blocks", "") if packing.method == "mxfp4" else (".qweight", ".weight")
    packed = {
        name: tensor
        for name, tensor in tensors.items()
        if name.removesuffix(ends[1]) + ends[0] in stored
    }
    by_group = any(
        _is_permuted(stored[f"{name.removesuffix('.weight')}.g_idx"])
        for name in packed
        if f"{name.removesuffix('.weight')}.g_idx" in stored
    )
    unpacked = {name: tensor for name, tensor in tensors.items() if name not in packed}
    floats = {leaf.path for tensor in unpacked.values() for leaf in tensor.leaves}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in packed.items():
        for leaf in tensor.leaves:
            if "layers" not in leaf.axes.stack:
                raise InteropError(
                    f"{folder}: {name} is packed, and this library keeps it in floats; give a "
                    "model whose output matrix and embedding are not packed"
                )
            if leaf.path in floats:
                raise InteropError(
                    f"{folder}: {name} is packed, and that of another layer is not; give a model "
                    "whose layers are packed alike"
                )
        if packing.method == "mxfp4":
            parts = _mxfp4_parts(name, stored)
        else:
            parts = _int32_parts(name.removesuffix(".weight"), stored, packing, tensor, by_group)
        # AutoGPTQ writes a bias of zeros for layers that have none.
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in stored and bias not in tensors and not np.any(stored[bias].read()):
            del stored[bias]
        for part, array in parts.items():
            each = _part_tensor(tensor, part, array)
            for leaf in each.leaves:
                if shapes.setdefault(leaf.path, leaf.shape) != leaf.shape:
                    raise InteropError(
                        f"{array.path}: {array.name} has another shape than that of another layer; "
                        "give a model whose layers are packed alike"
                    )
            stored[each.name] = array
            unpacked[each.name] = each
    return unpacked


def _part_tensor(tensor: Tensor, part: str, array: PackedPart) -> Tensor:
    """Return the tensor of one part, whose rows stand for inputs, pairs of them, or groups."""
    is_vector = part == "group_of_input"
    layout: Any = SharedVector() if is_vector else tensor.layout
    if isinstance(layout, WholeStack):
        rows = array.shape[-2]
    else:
        rows = array.shape[-1 if getattr(layout, "transposed", True) else 0]

    def leaf_of(leaf: Leaf) -> Leaf:
        stack, num_inputs = leaf.num_stacked, len(leaf.axes.inputs)
        outputs = () if is_vector else leaf.shape[stack + num_inputs :]
        shape = (*leaf.shape[:stack], rows, *outputs)
        names = () if is_vector else leaf.axes.outputs
        axes = LogicalAxes(leaf.axes.stack, leaf.axes.inputs[:1], names)
        return Leaf(f"{leaf.path}/{part}", axes, shape, shape)

    leaves = tuple(map(leaf_of, tensor.leaves))
    return Tensor(f"{tensor.name}/{part}", leaves, tensor.index, layout)


def _mxfp4_parts(name: str, stored: MutableMapping[str, Any]) -> dict[str, PackedPart]:
    """Return the parts of a stack of experts, [E, rows, outputs]."""
    blocks = stored.pop(f"{name}_blocks")
    scales = _take(f"{name}_scales", blocks, stored)
    experts, outputs, groups, size = _check(blocks, "U8", 4)
    if _check(scales, "U8", 3) != (experts, outputs, groups):
        raise InteropError(f"{scales.path}: {scales.name} is not of the shape of {blocks.name}")

    def codes() -> Array:
        return blocks.view.reshape(experts, outputs, groups * size).swapaxes(1, 2)

    def exponents() -> Array:
        return scales.view.reshape(experts, outputs, groups).swapaxes(1, 2)

    byte = np.dtype(np.uint8)
    return {
        "codes": PackedPart(
            blocks.path, blocks.name, (experts, groups * size, outputs), byte, codes, blocks.mapped
        ),
        "scales": PackedPart(
            scales.path, scales.name, (experts, groups, outputs), byte, exponents, scales.mapped
        ),
    }


def _int32_parts(
    stem: str,
    stored: MutableMapping[str, Any],
    packing: Packing,
    tensor: Tensor,
    by_group: bool,
) -> dict[str, PackedPart]:
    """Return the parts of a matrix of GPTQ or AWQ."""
    weight = stored.pop(f"{stem}.qweight")
    zeros, scales = (_take(f"{stem}.{end}", weight, stored) for end in ("qzeros", "scales"))
    per_word = 32 // packing.bits
    rows, columns = _check(weight, "I32", 2)
    inputs, outputs = (rows, columns * 8) if packing.method == "awq" else (rows * per_word, columns)
    groups = scales.shape[0]
    if scales.shape != (groups, outputs) or inputs % groups:
        raise InteropError(f"{scales.path}: {scales.name} does not fit the shape of {weight.name}")
    if _check(zeros, "I32", 2) != (groups, outputs // per_word):
        raise InteropError(f"{zeros.path}: {zeros.name} does not fit the shape of {weight.name}")
    transposed = getattr(tensor.layout, "transposed", True)
    wide = packing.bits == 8

    def part(source: Any, shape: tuple[int, ...], dtype: Any, convert: Any) -> PackedPart:
        shape = shape[::-1] if transposed else shape
        turn = (lambda: convert().T) if transposed else convert
        return PackedPart(source.path, source.name, shape, np.dtype(dtype), turn, source.mapped)

    def codes() -> Array:
        if packing.method == "awq":
            unpacked = _unpack_columns(weight.view, inputs, 4)[..., AWQ_COLUMNS]
            unpacked = unpacked.reshape(inputs, outputs)
            return unpacked[0::2] | unpacked[1::2] << 4
        # The bytes of an int32, from the low ones: inputs, or pairs of them.
        words = weight.view.reshape(rows, columns, 4)
        packed = np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(-1, columns)
        return (packed ^ 0x80).view(np.int8) if wide else packed

    def zero_points() -> Array:
        unpacked = _unpack_columns(zeros.view, groups, packing.bits)
        if packing.method == "awq":
            unpacked = unpacked[..., AWQ_COLUMNS]
        # In uint8, and the sum wraps: AutoGPTQ cuts it to the bits of a code.
        points = unpacked.reshape(groups, outputs) + np.uint8(packing.zero_offset)
        return points.astype(np.int16) - 128 if wide else points & 15

    stored_rows = inputs if wide else inputs // 2
    parts = {
        "codes": part(weight, (stored_rows, outputs), np.int8 if wide else np.uint8, codes),
        "scales": part(scales, scales.shape, scales.read().dtype, scales.read),
        "zeros": part(zeros, (groups, outputs), np.int16 if wide else np.uint8, zero_points),
    }
    index = _take(f"{stem}.g_idx", weight, stored) if f"{stem}.g_idx" in stored else None
    if by_group:
        if index is None:
            raise InteropError(
                f"{weight.path}: lacks {stem}.g_idx, which other matrices have; fetch it again"
            )
        if _check(index, "I32", 1) != (inputs,):
            raise InteropError(f"{index.path}: {index.name} is not of the {inputs} inputs")
        parts["group_of_input"] = PackedPart(
            index.path,
            index.name,
            (inputs,),
            np.dtype(np.int32),
            lambda: index.view.view("<i4"),
            index.mapped,
        )
    return parts


def _unpack_columns(view: Array, rows: int, bits: int) -> Array:  # [rows, words, codes of a word]
    """Return the codes of int32s, which lie along the outputs."""
    words = view.reshape(rows, -1, 4)
    if bits == 8:
        return words
    return np.stack([words & 15, words >> 4], axis=-1).reshape(rows, -1, 8)


def _is_permuted(index: Any) -> bool:
    """Return True unless the inputs of a group lie side by side."""
    groups = index.view.view("<i4")
    size = len(groups) // (int(groups.max()) + 1)
    return bool(np.any(groups != np.arange(len(groups)) // size))


def _take(name: str, beside: Any, stored: MutableMapping[str, Any]) -> Any:
    """Remove a tensor from the files' and return it."""
    if name not in stored:
        raise InteropError(f"{beside.path}: has {beside.name}, and lacks {name}; fetch it again")
    return stored.pop(name)


def _check(tensor: Any, dtype: str, ndim: int) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    shape: tuple[int, ...] = tensor.shape
    if tensor.dtype != dtype or len(shape) != ndim:
        raise InteropError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype} of {len(shape)} axes, and packed "
            f"weights have {dtype} of {ndim}; fetch the config.json that belongs to the file"
        )
    return shape

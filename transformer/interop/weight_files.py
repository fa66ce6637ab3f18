"""Safetensors files: slices of parameters are read from them, and tensors are written one by one.

The `safetensors` package (0.8) checks the headers. Its readers copy whole tensors, of which a
device may need a slice, and its writer takes all tensors of a file at once. So tensors are views of
the mapped file here (transposing and slicing a view reads nothing), and a file is written tensor by
tensor, with the bytes of the package. For 1.07 GB of weights: reading peaks at 1.25 GB of memory,
and by the package at 1.63 GB (1.82 GB on a mesh of 8 devices, which all copy it); writing takes
0.24 GB beside the weights, and by the package 1.06 GB.
"""

import dataclasses
import fnmatch
import itertools
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from transformer.interop.family import Family
from transformer.interop.fields import InteropError
from transformer.interop.packed_weights import PackedPart, Packing, unpack_tensors
from transformer.interop.weight_map import Array, Leaf, Tensor, Weight
from transformer.models.config import TransformerConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES: dict[str, Any] = {
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}
"""Dtypes of weights that are read and written, by their names in safetensors files."""

WEIGHT_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
"""The same by the names of NumPy."""

HEAD_PATHS = ("head", "output", "pooler")
"""Starts of the tree paths of parameters that are not of the body."""

MAX_COPY_THREADS = 8
"""Threads that copy the layers of a parameter: NumPy holds no lock while it copies."""

MIN_THREADED_BYTES = 1_000_000
"""Size below which threads cost more than they save."""

TILE_BYTES, TILE_ROWS = 2048, 16
"""Size of a tile: bytes along a row of the source, and rows. Both copies of it fit into the L1
cache."""

ALIGNMENT = 64
"""Bytes to which XLA aligns the buffers of a CPU."""


# Reading.


class StoredTensor(NamedTuple):
    """A tensor of an open file."""

    path: Path
    name: str
    """Name in the file."""
    dtype: str
    """Name of the dtype in the format."""
    shape: tuple[int, ...]
    view: Array
    """View of the mapped file; bytes if the dtype is not one of `DTYPES`."""
    mapped: mmap.mmap

    def read(self) -> Array:
        """Return the values as a read-only view of the file."""
        if self.dtype not in DTYPES:
            raise InteropError(
                f"{self.path}: {self.name} is stored as {self.dtype}; give float32, float16 or "
                "bfloat16 weights"
            )
        return self.view


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    Raises:
      InteropError: The file is missing or damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = np.frombuffer(mapped, np.uint8)
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            view = content[start:][slice(*entry["data_offsets"])]
            if dtype in DTYPES:
                view = view.view(DTYPES[dtype]).reshape(shape)
            tensors[name] = StoredTensor(path, name, dtype, shape, view, mapped)
    except (OSError, ValueError, SafetensorError) as error:
        raise InteropError(
            f"{path}: cannot be read ({error}); it is missing or damaged, fetch it again"
        ) from error
    return tensors


class WeightFiles:
    """The tensors of the safetensors files of a folder."""

    def __init__(self, folder: Path, family: Family, name_of: Callable[[str], str] = str) -> None:
        """Open the file or files of a folder.

        Args:
          folder: Folder of the files.
          family: Family of the model.
          name_of: Function from a tensor's name in the files to its name in the family; empty for
            `other_parts` of a multimodal model, which are not read.

        Raises:
          InteropError: There are none, or one is damaged, or the index is.
        """
        if (folder / INDEX).exists():
            files = _index_files(folder / INDEX)
        elif (folder / WEIGHTS).exists():
            files = [WEIGHTS]
        else:
            raise _no_weights(folder)
        stored: dict[str, Any] = {}
        for file in files:
            stored |= open_safetensors(folder / file)
        self.other_parts = [name for name in stored if not name_of(name)]
        stored = {name_of(name): each for name, each in stored.items() if name_of(name)}
        # Files of the body alone (`AutoModel`) lack the prefix that a model with a head has.
        is_bare = not any(name.startswith(family.prefix) for name in stored)
        prefix = family.prefix if is_bare else ""
        self._folder = folder
        # StoredTensors, and the PackedParts of packed matrices.
        self._stored: dict[str, Any] = {
            _modern_name(name, prefix): tensor for name, tensor in stored.items()
        }
        self._optional = set[str]()  # names that a model may have no use for

    def read(self, name: str) -> Array:
        """Return a tensor as a view of its file."""
        return self._stored[name].read()

    def dtype(self, name: str) -> Any:
        """Return the dtype of a part of a packed matrix; None of other tensors."""
        part = self._stored[name]
        return part.dtype if isinstance(part, PackedPart) else None

    def unpack(self, tensors: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
        """Return the tensors with the parts of packed matrices (see `unpack_tensors`)."""
        return unpack_tensors(tensors, self._stored, packing, self._folder)

    def release(self) -> None:
        """Give back the memory of the pages that were read; views read them again if needed."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for mapped in {id(x.mapped): x.mapped for x in self._stored.values()}.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def tie(self, weights: Sequence[Weight], config: TransformerConfig) -> TransformerConfig:
        """Return the config with the ties that the files have, which win as in `transformers`.

        A table that the files lack is the one that it is tied to. One that they have, with other
        values than the one that it should be tied to, is a table of its own.
        """
        stored = self._stored
        inputs = _names(weights, "embedding", "source_embedding")
        outputs, biases = _names(weights, "output"), _names(weights, "head_output_bias")
        candidates = [*inputs, *(outputs if config.tie_embeddings else [])]
        present = [name for name in candidates if name in stored]
        if not present:
            return config  # a table is missing, which `check` names
        self._optional = {*inputs, *biases}
        shared, target = inputs[0], inputs[-1]
        # The output matrix is tied to the shared table, if there is one, and else to the target's.
        tied = shared if shared in stored else target
        for name in inputs:
            stored.setdefault(name, stored[present[0]])
        if config.tie_embeddings:
            for name in outputs:
                stored.setdefault(name, stored[tied])
        if config.encoder is not None:
            is_one = self._are_equal(inputs[-2], target)
            stored[shared] = stored[target]
            size = 0 if is_one else config.encoder.vocab_size or config.vocab_size
            encoder = dataclasses.replace(config.encoder, vocab_size=size)
            config = dataclasses.replace(config, encoder=encoder)
        for name in outputs if config.tie_embeddings else []:
            if self._are_equal(name, target):
                self._optional.add(name)
            else:
                config = dataclasses.replace(config, tie_embeddings=False)
        # Of two names of one bias, the second is added to the logits.
        if present_biases := [name for name in biases if name in stored]:
            stored |= dict.fromkeys(biases, stored[present_biases[-1]])
        self.release()
        return config

    def split_heads(
        self, tensors: Mapping[str, Tensor], family: Family
    ) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors that the files have, and the names of those of another head.

        Tensors of the body that are missing stay, for `check`.
        """
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if name in self._stored
            or not all(leaf.path.startswith(HEAD_PATHS) for leaf in tensor.leaves)
        }
        body = {weight.theirs.partition(".")[0] for weight in family.weights}
        known = self._optional | tensors.keys()
        left_out = {
            name
            for name in self._stored.keys() - known
            if name.partition(".")[0] not in body and not _is_ignored(name, family)
        }
        self._optional |= left_out
        return kept, sorted(left_out)

    def check(self, expected: Mapping[str, Tensor], family: Family) -> None:
        """Raise InteropError unless the files hold exactly these tensors."""
        known = expected.keys() | self._optional | set(family.zeros)
        missing = [name for name in expected if name not in self._stored]
        extra = [
            name for name in self._stored if name not in known and not _is_ignored(name, family)
        ]
        if missing:
            also = f", and has {extra[0]} too many" if extra else ""
            raise InteropError(
                f"{self._folder}: lacks {_count(missing)}, first {missing[0]} of shape "
                f"{list(expected[missing[0]].shape)}{also}; fetch the files again, or the "
                "config.json that belongs to them"
            )
        if extra:
            raise InteropError(
                f"{self._folder}: has {_count(extra)} that the model of config.json lacks, first "
                f"{extra[0]}; fetch the config.json that belongs to the files"
            )
        for name, tensor in expected.items():
            stored = self._stored[name]
            if stored.shape != tensor.shape:
                raise InteropError(
                    f"{stored.path}: {stored.name} has shape {list(stored.shape)}, and config.json "
                    f"says {list(tensor.shape)}; fetch the config.json that belongs to the file"
                )
            if isinstance(stored, StoredTensor):
                stored.read()  # refuses other dtypes before anything is loaded
        for name in family.zeros:
            if name in self._stored and np.any(self.read(name)):
                raise InteropError(
                    f"{self._folder}: {name} is not zero, and this library has no such bias; "
                    "import a model without it"
                )

    def _are_equal(self, name: str, other: str) -> bool:
        a, b = self._stored[name], self._stored[other]
        return a is b or (a.dtype == b.dtype and np.array_equal(a.view, b.view))


def _names(weights: Sequence[Weight], *paths: str) -> list[str]:
    """Return the names of the tensors that hold some parameters."""
    return list(dict.fromkeys(weight.theirs for weight in weights if weight.ours in paths))


def _is_ignored(name: str, family: Family) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored)


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _modern_name(name: str, prefix: str) -> str:
    """Return a tensor's name as today's files have it.

    Files of a bare body lack its prefix, and the first files of BERT name gains and biases of norms
    gamma and beta.
    """
    name = name if name.startswith(("lm_head.", "cls.")) else prefix + name
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _index_files(path: Path) -> list[str]:
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InteropError(f"{path}: has no weight_map; fetch it again")
    names = sorted(set(map(str, table.values())))
    for name in names:
        # A path in an index could lead out of the folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InteropError(
                f"{path}: names {name!r}, which is not a file of its folder; fetch it again"
            )
    return names


def _no_weights(folder: Path) -> InteropError:
    for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
        for pickled in folder.glob(pattern):
            return InteropError(
                f"{pickled}: is pickled, and unpickling runs code of the file; convert it where "
                "transformers is installed: AutoModelForCausalLM.from_pretrained(SOURCE)"
                ".save_pretrained(FOLDER) writes safetensors"
            )
    return InteropError(f"{folder}: has no {WEIGHTS}; give a folder of safetensors weights")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
      InteropError: It is missing, or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InteropError(f"{path}: {error.strerror}; give a folder that has it") from error
    except (ValueError, RecursionError) as error:
        raise InteropError(f"{path}: is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise InteropError(f"{path}: is not a JSON object; fetch it again")
    return value


Place = tuple[Tensor, int]  # a tensor, and the number of the leaf among those that it holds


def places_by_leaf(tensors: Iterable[Tensor]) -> dict[str, dict[tuple[int, ...], Place]]:
    """Return, for each parameter, the tensor of each index of its stack axes."""
    places: dict[str, dict[tuple[int, ...], Place]] = {}
    for tensor in tensors:
        for number, leaf in enumerate(tensor.leaves):
            places.setdefault(leaf.path, {})[tensor.index] = tensor, number
    return places


def read_slice(
    files: WeightFiles,
    places: Mapping[tuple[int, ...], Place],
    leaf: Leaf,
    dtype: Any,
    index: tuple[slice, ...],
) -> Array:
    """Return a slice of a parameter, read from the views of its tensors. Padding is zero."""
    # A shard of a parameter may cut both its stack of layers and the matrix of each.
    ranges = [range(size)[part] for size, part in zip(leaf.padded_shape, index, strict=True)]
    num_stacked = len(next(iter(places)))  # not that of the leaf: a tensor may hold all experts
    stack, unit_ranges = ranges[:num_stacked], ranges[num_stacked:]
    unit_index = tuple(slice(span.start, span.stop) for span in unit_ranges)
    values = aligned_zeros([len(span) for span in ranges], dtype)

    def copy_unit(place: tuple[int, ...]) -> None:
        tensor, number = places[tuple(span[i] for span, i in zip(stack, place, strict=True))]
        unit = tensor.layout.split(files.read(tensor.name), tensor.leaves)[number]
        part = unit[unit_index]  # shorter than the slice where the vocabulary is padded
        copy_in_tiles(values[place][tuple(map(slice, part.shape))], part)

    units = list(np.ndindex(*map(len, stack)))
    if values.nbytes < MIN_THREADED_BYTES:
        for place in units:
            copy_unit(place)
        return values
    with ThreadPoolExecutor(min(MAX_COPY_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(copy_unit, units))  # `list` raises what a thread raised
    return values


def aligned_zeros(shape: Sequence[int], dtype: Any) -> Array:
    """Return zeros whose memory `jax.device_put` hands to a CPU device without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def copy_in_tiles(target: Array, source: Array) -> None:
    """Copy an array to one in C order, a transposed one tile by tile.

    Across a transposed matrix NumPy reads one entry of each cache line, and lines evict each other
    where rows are a power of two apart. So a tile is first copied in the order of the source (and
    cast there), then transposed within the cache: a matrix of 5,504 x 2,048 bfloat16 entries takes
    a third of the time that square tiles without that copy take.
    """
    # Axes of size 1 have strides without meaning. The last axis wins where strides are equal.
    strides = [
        abs(stride) if size > 1 else sys.maxsize
        for stride, size in zip(source.strides, source.shape, strict=True)
    ]
    if not source.size or not strides or strides[-1] == min(strides):
        target[...] = source
        return
    fastest = strides.index(min(strides))
    source, target = np.moveaxis(source, fastest, -2), np.moveaxis(target, fastest, -2)
    width = max(1, TILE_BYTES // target.itemsize)
    *outer, length, num_rows = source.shape
    starts = list(itertools.product(range(0, length, width), range(0, num_rows, TILE_ROWS)))
    for place in np.ndindex(*outer):
        for start, row in starts:
            tile = (*place, slice(start, start + width), slice(row, row + TILE_ROWS))
            target[tile] = np.array(source[tile], target.dtype, order="F")


# Writing.


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    read: Callable[[str], Array],
) -> None:
    """Write a file, which appears under its name only once it is complete.

    Args:
      path: The file.
      shapes: Names and shapes of the tensors.
      dtype: Dtype of the file, one of `WEIGHT_DTYPES`.
      read: Returns the values of one tensor by its name.
    """
    code = next(code for code, known in DTYPES.items() if known == WEIGHT_DTYPES[dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in sorted(shapes.items()):
        stop = start + math.prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in sorted(shapes.items()):
                values = as_c_order(read(name), DTYPES[code])
                assert values.shape == shape
                file.write(values.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def as_c_order(values: Array, dtype: Any) -> Array:
    """Return an array in C order and of a dtype; the array itself if it is both already."""
    if values.flags.c_contiguous:
        return np.ascontiguousarray(values, dtype).reshape(values.shape)
    copy = np.empty(values.shape, dtype)
    copy_in_tiles(copy, values)
    return copy

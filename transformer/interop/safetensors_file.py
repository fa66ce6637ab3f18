"""Read and write safetensors files, one tensor at a time.

A file is 8 bytes of header size, a JSON header and the raw values of all tensors. Tensors are views
of the mapped file: transposing and slicing a view reads nothing, so a device that needs a slice of
a tensor reads the pages of that slice. (The `safetensors` package copies whole tensors for NumPy,
and writes from a dict that holds all tensors at once.)
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer.interop.fields import InteropError
from transformer.interop.strided_copy import Array, as_c_order

DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""NumPy dtype of each dtype name of the format. Values are little-endian."""

WEIGHT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of weights that are read and written."""

MAX_AXES = 32
"""Largest number of axes that every version of NumPy can have."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header, as in the `safetensors` package: a larger size is a damaged file."""


class Entry(NamedTuple):
    """Place of one tensor in a file."""

    dtype: str
    """Name in `DTYPES`, or another name of the format, which cannot be read."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int


class SafetensorsFile:
    """An open safetensors file. `tensors` lists its contents; `read` returns one as a view."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
          InteropError: The file is missing or truncated, or its header lies about its sizes.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise InteropError(f"{path}: cannot be read ({error}); fetch it again") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.tensors, self.metadata = self._read_header()

    def read(self, name: str) -> Array:
        """Return a tensor as a read-only view of the file."""
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise InteropError(
                f"{self.path}: {name} is stored as {entry.dtype}; give float32, float16 or bfloat16"
            )
        view = self._bytes[entry.start : entry.stop].view(DTYPES[entry.dtype])
        return np.asarray(view).reshape(entry.shape)

    def release(self) -> None:
        """Give back the memory of the pages that were read; views read them again if needed."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = len(self._bytes)
        if size < 8:
            raise self._damaged("is shorter than its header")
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise self._damaged(f"has {size} bytes, and a header that claims {length}")
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes())
            metadata = header.pop("__metadata__", {})
            entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        except InteropError:
            raise
        except Exception as error:
            raise self._damaged(f"has a header that is not valid ({error})") from error
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != end:
                raise self._damaged(f"has a gap or an overlap before {name}")
            end = entry.stop
        if end != size:
            raise self._damaged(f"has {size} bytes, and a header that describes {end}")
        return entries, metadata

    def _entry(self, name: str, value: Mapping[str, Any], data_start: int) -> Entry:
        start, stop = (int(each) for each in value["data_offsets"])
        shape = tuple(int(each) for each in value["shape"])
        dtype = str(value["dtype"])
        if start < 0 or stop < start or any(each < 0 for each in shape):
            raise self._damaged(f"has a negative size for {name}")
        if len(shape) > MAX_AXES:
            raise self._damaged(f"has {len(shape)} axes for {name}")
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
            raise self._damaged(f"has {stop - start} bytes for {name} of shape {list(shape)}")
        return Entry(dtype, shape, data_start + start, data_start + stop)

    def _damaged(self, problem: str) -> InteropError:
        return InteropError(f"{self.path}: {problem}; it is damaged or truncated, fetch it again")


class TensorSpec(NamedTuple):
    """A tensor to be written: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """NumPy name, one of `WEIGHT_DTYPES`."""

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * np.dtype(_dtype(self.dtype)).itemsize


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "bfloat16" else name


def split_into_shards(specs: list[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file, in order; a tensor larger than the limit has its own."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def write_safetensors(path: Path, specs: Iterable[TensorSpec], read: Any) -> None:
    """Write a file; `read(name)` returns the values of one tensor, asked for in order.

    The file appears under its name only once it is complete.
    """
    # Largest dtype first, so that values are aligned, then by name: the order of the package.
    specs = sorted(specs, key=lambda spec: (-np.dtype(_dtype(spec.dtype)).itemsize, spec.name))
    names = {np.dtype(value).name: name for name, value in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        stop = start + spec.num_bytes
        header[spec.name] = {
            "dtype": names[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in specs:
                values = as_c_order(read(spec.name), _dtype(spec.dtype))
                assert values.shape == spec.shape
                file.write(values.view(np.uint8).data if values.ndim else values.tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

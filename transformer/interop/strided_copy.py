"""Copies of transposed arrays, and memory that a CPU device takes as it is."""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TILE_BYTES, TILE_ROWS = 2048, 16
"""Size of a tile: bytes along a row of the source, and rows. Both copies of it fit into the L1
cache."""

ALIGNMENT = 64
"""Bytes to which XLA aligns the buffers of a CPU."""


def aligned_zeros(shape: Sequence[int], dtype: Any) -> Array:
    """Return zeros whose memory `jax.device_put` hands to a CPU device without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def as_c_order(values: Array, dtype: Any) -> Array:
    """Return an array in C order and of a dtype; the array itself if it is both already."""
    if values.flags.c_contiguous:
        return np.ascontiguousarray(values, dtype)
    copy = np.empty(values.shape, dtype)
    copy_in_tiles(copy, values)
    return copy


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
    source, target = (np.moveaxis(each, fastest, -2) for each in (source, target))
    width = max(1, TILE_BYTES // target.itemsize)
    *outer, length, num_rows = source.shape
    starts = list(itertools.product(range(0, length, width), range(0, num_rows, TILE_ROWS)))
    for place in np.ndindex(*outer):
        for start, row in starts:
            tile = (*place, slice(start, start + width), slice(row, row + TILE_ROWS))
            target[tile] = np.array(source[tile], target.dtype, order="F")

"""Copies in tiles against NumPy's own assignment, for every order of axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.interop.weight_files import aligned_zeros, as_c_order, copy_in_tiles

SIZES = (37, 3, 2, 1100)
"""More than a tile along one axis, more than its rows along another."""


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_copies_match_numpy_for_every_axis_order(dtypes: tuple[str, str]) -> None:
    source_dtype, target_dtype = (jnp.dtype(each) for each in dtypes)
    values = np.random.default_rng(0).normal(size=SIZES).astype(source_dtype)
    for order in itertools.permutations(range(len(SIZES))):
        source = values.transpose(order)
        target = np.empty(source.shape, target_dtype)
        copy_in_tiles(target, source)
        np.testing.assert_array_equal(target, source.astype(target_dtype))
        copy = as_c_order(source, target_dtype)
        assert copy.flags.c_contiguous
        np.testing.assert_array_equal(copy, source.astype(target_dtype))


def test_copies_of_slices_and_small_arrays_match_numpy() -> None:
    values = np.arange(2000 * 40, dtype=np.float32).reshape(2000, 40)
    for source in (
        values.T[3:, 1::3],
        values.T[::-1],
        values.T[:, ::-1],
        values.T[:1],
        values.T[:, :1],
        values[:0].T,
        values[0],
        values[0, 0],
    ):
        target = np.full(source.shape, -1, np.float32)
        copy_in_tiles(target, source)
        np.testing.assert_array_equal(target, source)
        np.testing.assert_array_equal(as_c_order(source, np.float32), source)


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (), (513,)])
def test_aligned_memory_can_be_put_on_a_device_and_donated(shape: tuple[int, ...]) -> None:
    memory = aligned_zeros(shape, jnp.bfloat16)
    assert memory.ctypes.data % 64 == 0 or not memory.size
    assert (memory.shape, memory.dtype) == (shape, jnp.bfloat16)
    memory[...] = 2
    array = jax.device_put(memory)
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    np.testing.assert_array_equal(added, np.full(shape, 3, jnp.bfloat16))

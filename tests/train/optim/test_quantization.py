from typing import Any

import jax
import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from train.optim.adamw_8bit import BLOCK_SIZE, code_values, dequantize, nearest_code, quantize

Array = np.ndarray[Any, Any]

to_codes = jax.jit(nearest_code, static_argnames="signed")


def table(signed: bool) -> Array:
    """Return the values of Dettmers et al. 2022, sections 1.3 and 2.2: seven decades."""
    actual = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        actual += [*middles, *(-middles if signed else ())]
    return np.sort(actual)


def nearest(x: Array, signed: bool) -> Array:  # float64 [n] -> [n]
    """Return the nearest code; not that of 0 for an unsigned number above 0."""
    distances = np.abs(table(signed)[None] - x[:, None])
    if not signed:
        distances[x > 0, 0] = np.inf
    return distances.argmin(axis=1)


@pytest.mark.parametrize("signed", [True, False])
def test_all_codes_round_trip(signed: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    actual = jax.jit(code_values, static_argnames="signed")(codes, signed=signed)
    np.testing.assert_allclose(actual, table(signed), rtol=3e-7)
    np.testing.assert_array_equal(to_codes(actual, signed=signed), codes)


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_code_changes_halfway_between_two_values(signed: bool) -> None:
    """Right below and above all 255 ties, and at the ends of the range."""
    values = table(signed)
    ties = (values[1:] + values[:-1]) / 2
    ends = [-1.0, -1e-30, 0.0, 1e-30, 1.0] if signed else [0.0, 1e-30, 1.0]
    x = np.concatenate([ties * (1 - 1e-6), ties * (1 + 1e-6), ends]).astype(np.float32)
    codes = to_codes(x, signed=signed)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, nearest(x.astype(np.float64), signed))
    # Unsigned 1e-30 is not 0: such a second moment would make Adam divide by epsilon alone.
    expected = [0, 127, 127, 127, 255] if signed else [0, 1, 255]
    assert list(codes[-len(ends) :]) == expected


def blocks(x: Array, stack: int, signed: bool) -> Array:
    """Quantize each layer's memory in blocks of 256, each scaled by its largest magnitude."""
    actual = np.zeros(x.shape)
    for layer in np.ndindex(x.shape[:stack]):
        flat = x[layer].astype(np.float64).ravel()
        done = []
        for first in range(0, len(flat), BLOCK_SIZE):
            part = flat[first : first + BLOCK_SIZE]
            scale = np.abs(part).max() or 1.0
            done.append(table(signed)[nearest(part / scale, signed)] * scale)
        actual[layer] = np.concatenate(done).reshape(x.shape[stack:])
    return actual


@pytest.mark.parametrize(
    ("shape", "stack", "scales", "signed"),
    [
        ((5, 512), 0, (5, 2), True),  # blocks within the last axis
        ((2, 3, 8, 64), 1, (2, 3, 2), False),  # blocks within the last two axes
        ((2, 3, 7, 11), 2, (2, 3, 1), True),  # a layer is smaller than a block
        ((3, 17, 19), 1, (3, 2), False),  # the second block is short
        ((300,), 0, (2,), True),
        ((2, 16, 32), 1, (2, 2), False),  # all axes of a layer together
    ],
)
def test_blocks_follow_layer_memory(
    shape: tuple[int, ...], stack: int, scales: tuple[int, ...], signed: bool
) -> None:
    x: Any = np.random.RandomState(0).randn(*shape).astype(np.float32)
    x = x**3 if signed else np.abs(x) ** 3
    x[(0,) * len(shape)] *= 1000
    x[-1] = 0  # whole blocks of zeros where the shape has more than one axis

    def both(x: Any) -> Any:
        stored = quantize(x, stack, signed=signed)
        return *stored, dequantize(*stored, stack, signed=signed)

    codes, found_scales, again = jax.jit(both)(x)
    assert (codes.dtype, codes.shape) == (np.uint8, shape)
    assert (np.asarray(codes)[x == 0] == (127 if signed else 0)).all()
    assert (found_scales.dtype, found_scales.shape) == (np.float32, scales)
    np.testing.assert_allclose(again, blocks(x, stack, signed), rtol=1e-6)

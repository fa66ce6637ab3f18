from typing import Any

import jax
import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from train.optim.quantization import BLOCK_SIZE, code_values, dequantize, nearest_code, quantize

Array = np.ndarray[Any, Any]


def table(signed: bool) -> Array:
    """Return the code table of Dettmers et al.

    2022, sections 1.3 and 2.2: seven decades in even parts.
    """
    actual = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        actual += [*middles, *(-middles if signed else ())]
    return np.sort(actual)


@pytest.mark.parametrize("signed", [True, False])
def test_all_codes_round_trip(signed: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    actual = jax.jit(code_values, static_argnames="signed")(codes, signed=signed)
    np.testing.assert_allclose(actual, table(signed), rtol=3e-7)
    again = jax.jit(nearest_code, static_argnames="signed")(actual, signed=signed)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_code(signed: bool) -> None:
    """Values in all decades, and around their boundaries."""
    random = np.random.RandomState(0)
    edges = np.outer(10.0 ** -np.arange(8), random.uniform(0.9, 1.1, 300)).ravel()
    x = np.concatenate([random.uniform(0, 1, 3000), 10 ** random.uniform(-9, 0, 3000), edges])
    x = np.minimum(x, 1).astype(np.float32) * (random.choice([-1, 1], len(x)) if signed else 1)
    codes = np.asarray(jax.jit(nearest_code, static_argnames="signed")(x, signed=signed))
    distances = distances_to_all(x.astype(np.float64), signed)
    own = distances[np.arange(len(x)), codes]
    assert (own - distances.min(axis=1) <= 1e-6 * np.abs(x)).all()


def distances_to_all(x: Array, signed: bool) -> Array:  # [n] -> [n, 256]
    """Return the distance of each value to each code; inf for a positive square and code 0."""
    distances = np.abs(table(signed)[None] - x[:, None])
    if not signed:
        distances[x > 0, 0] = np.inf
    return distances


def blocks(x: Array, stack: int, signed: bool) -> Array:
    """Quantize each layer's memory in blocks of 256, each scaled by its largest magnitude."""
    actual = np.zeros(x.shape)
    for layer in np.ndindex(x.shape[:stack]):
        flat = x[layer].astype(np.float64).ravel()
        parts = [flat[i : i + BLOCK_SIZE] for i in range(0, len(flat), BLOCK_SIZE)]
        done = []
        for part in parts:
            scale = np.abs(part).max() or 1.0
            distances = distances_to_all(part / scale, signed)
            done.append(table(signed)[distances.argmin(axis=1)] * scale)
        actual[layer] = np.concatenate(done).reshape(x.shape[stack:])
    return actual


@pytest.mark.parametrize(
    ("shape", "stack", "scales"),
    [
        ((5, 512), 0, (5, 2)),  # blocks within the last axis
        ((2, 3, 8, 64), 1, (2, 3, 2)),  # blocks within the last two axes
        ((2, 3, 7, 11), 2, (2, 3, 1)),  # a layer is smaller than a block
        ((3, 17, 19), 1, (3, 2)),  # the second block is short
        ((300,), 0, (2,)),
        ((2, 16, 32), 1, (2, 2)),  # all axes of a layer together
    ],
)
@pytest.mark.parametrize("signed", [True, False])
def test_blocks_follow_layer_memory(
    shape: tuple[int, ...], stack: int, scales: tuple[int, ...], signed: bool
) -> None:
    x: Any = np.random.RandomState(0).randn(*shape).astype(np.float32)
    x = x**3 if signed else np.abs(x) ** 3
    x[(0,) * len(shape)] *= 1000

    def both(x: Any) -> Any:
        stored = quantize(x, stack, signed=signed)
        return *stored, dequantize(*stored, stack, signed=signed)

    codes, found_scales, again = jax.jit(both)(x)
    assert (codes.dtype, codes.shape) == (np.uint8, shape)
    assert (found_scales.dtype, found_scales.shape) == (np.float32, scales)
    np.testing.assert_allclose(again, blocks(x, stack, signed), rtol=1e-6)


def test_zeros_stay_zero() -> None:
    zeros: Any = np.zeros((3, 256), np.float32)
    codes, scales = quantize(zeros, 0, signed=True)
    assert not np.asarray(scales).any()
    assert not np.asarray(dequantize(codes, scales, 0, signed=True)).any()

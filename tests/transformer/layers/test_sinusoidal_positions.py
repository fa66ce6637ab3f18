import math

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close
from transformer.layers.position_embedding import sinusoidal_embedding as sinusoid_eagerly

sinusoid = jax.jit(sinusoid_eagerly, static_argnums=(1, 2))


@pytest.mark.parametrize("width", [2, 10, 13])
def test_matches_formula(width: int) -> None:
    """Sines at even entries and cosines at odd ones; an odd width ends with a sine."""
    positions = array([[0, 1, 4095], [131_071, 200, 1_048_575]])
    expected = np.zeros((2, 3, width))
    for b, t, entry in np.ndindex(expected.shape):
        angle = positions[b, t] / 10_000 ** ((entry - entry % 2) / width)
        expected[b, t, entry] = math.cos(angle) if entry % 2 else math.sin(angle)
    assert_close(sinusoid(positions, width), expected, 1e-6)


@pytest.mark.parametrize("width", [2, 10, 13])
def test_tensor2tensor_ends_at_the_longest_wavelength(width: int) -> None:
    """All sines, all cosines of D/2 wavelengths from 2 pi to 20000 pi; an odd width ends with 0."""
    positions, half = array([[0, 1, 4095]]), width // 2
    steps = np.arange(half) / max(half - 1, 1)
    angles = positions[..., None] / 10_000.0**steps
    odd = np.zeros((1, 3, width % 2))
    expected = np.concatenate([np.sin(angles), np.cos(angles), odd], axis=-1)
    assert_close(sinusoid(positions, width, "tensor2tensor"), expected, 1e-6)

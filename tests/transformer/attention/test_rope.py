from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, assert_close, normal, rotate_pair
from transformer import LinearScaling, Llama3Scaling, NoScaling, NTKScaling, RoPE, YaRNScaling
from transformer.attention.rope import RopeScaling, rope_angles
from transformer.attention.rope import apply_rope as rotate_eagerly

HALVES, INTERLEAVED = RoPE(theta=100.0), RoPE(theta=100.0, layout="interleaved")
POSITIONS: Any = np.array([[0, 1, 5, 3, 29], [7, 8, 9, 10, 1000]])


rotate = jax.jit(rotate_eagerly, static_argnames="config")


def expected_rotation(x: Array, positions: Array, config: RoPE) -> Array:
    """Rotate pair by pair; entries beyond the rotary width stay as they are."""
    width = config.rotary_dim(x.shape[-1])
    y = x.astype(np.float64)
    for b, t, n, pair in np.ndindex(*x.shape[:3], width // 2):
        is_halves = config.layout == "halves"
        entries = [pair, pair + width // 2] if is_halves else [2 * pair, 2 * pair + 1]
        angle = positions[b, t] / config.theta ** (2 * pair / width)
        y[b, t, n, entries] = rotate_pair(x[b, t, n, entries], angle)
    return y


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize(("fraction", "rotated"), [(1.0, 14), (0.5, 6), (0.2, 2)])
def test_matches_numpy(layout: str, fraction: float, rotated: int) -> None:
    config = RoPE(100.0, fraction, "halves" if layout == "halves" else "interleaved")
    assert config.rotary_dim(15) == rotated  # an odd width keeps its last entry
    x = normal(0, 2, 5, 3, 15)
    y = np.asarray(rotate(x, POSITIONS, config))
    assert_close(y, expected_rotation(x, POSITIONS, config), 1e-6)
    assert np.array_equal(y[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize(
    "scaling",
    [
        NoScaling(),
        LinearScaling(4.0),
        NTKScaling(4.0),
        YaRNScaling(4.0, 4096),
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_angles_are_exact_at_any_position(scaling: RopeScaling) -> None:
    """Against float64, where 2^31 radians leave 22 bits of precision: 1e-6 at the last position."""
    config = RoPE(theta=500_000.0, scaling=scaling)
    positions = np.array([[0, 1, 4095, 131_071, 1_048_575, 2**24 + 1, 2**31 - 1, -1, -1_048_575]])
    width = config.rotary_dim(128)
    angles = jax.jit(rope_angles, static_argnums=(1, 2))(positions, width, config)
    cos, sin = jax.jit(lambda x: (jnp.cos(x), jnp.sin(x)))(angles)
    expected = positions[..., None] * np.asarray(scaling.frequencies(config.theta, width))
    assert_close(cos, np.cos(expected), 1e-6)
    assert_close(sin, np.sin(expected), 1e-6)


def test_frequencies_have_float64_precision() -> None:
    """After a million positions, a float32 frequency would be off by 0.06 radians."""
    frequencies = NoScaling().frequencies(500_000.0, 128)
    for pair in (0, 1, 40, 63):
        exact = Decimal(500_000) ** (Decimal(-2 * pair) / Decimal(128))
        assert float(frequencies[pair]) == pytest.approx(float(exact), rel=1e-15)


@pytest.mark.parametrize("config", [HALVES, INTERLEAVED], ids=["halves", "interleaved"])
def test_scores_depend_only_on_relative_position(config: RoPE) -> None:
    q, k = normal(0, 1, 1, 1, 14), normal(1, 1, 1, 1, 14)

    def score(m: int, n: int) -> float:
        rotated = [rotate(x, jnp.array([[p]]), config) for x, p in ((q, m), (k, n))]
        return float(jnp.vdot(*rotated))

    assert score(5, 3) == pytest.approx(score(2, 0), abs=1e-5)
    assert score(105, 103) == pytest.approx(score(2, 0), abs=1e-4)
    assert score(0, 2) != pytest.approx(score(2, 0), abs=1e-2)


def test_bfloat16_input_uses_exact_angles() -> None:
    x = jnp.asarray(normal(0, 2, 5, 3, 14), jnp.bfloat16)
    y = rotate(x, POSITIONS, HALVES)
    assert y.dtype == jnp.bfloat16
    expected = expected_rotation(np.asarray(x, np.float32), POSITIONS, HALVES)
    assert_close(np.asarray(y, np.float32), expected, 2**-7)

"""Rotary position embedding (Su et al. 2021), with angles that are exact at any 32-bit position.

In float32, position * frequency is off by 1.5e-3 radians at position 131,071 and by 8.5e-3 at a
million: the more whole turns an angle has, the fewer digits are left for the rest. So a frequency
is stored as a 64-bit fixed-point fraction of a turn, and multiplied by the position modulo 2^64.
Whole turns overflow: the remainder is exact, on all hardware, and no compiler may reorder it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.position_config import RoPE
from transformer.attention.rope_scaling import Frequencies, LongRoPEScaling, long_rope_angles
from transformer.shape_checks import check_shapes

# A product of two 32-bit words needs 64 bits, which JAX has only with jax_enable_x64. Products of
# 16-bit halves fit into 32 bits.
HALF_BITS, LOW_HALF_MASK = np.uint32(16), np.uint32(2**16 - 1)


def apply_rope(
    x: jax.Array,  # [B, T, N, H]
    positions: jax.Array,  # [B, T]
    config: RoPE,
) -> jax.Array:  # [B, T, N, H]
    """Rotate each pair (a, b) of x by its angle: (a cos - b sin, a sin + b cos)."""
    check_shapes(x=(x, "B T N H", float), positions=(positions, "B? T", int), config=(config, RoPE))
    rotary_dim = int(x.shape[-1] * config.fraction) // 2 * 2  # R, as config.rotary_dim
    angles = rope_angles(positions, rotary_dim, config)[:, :, None, :]
    # In float32 until here: in bfloat16 an angle near pi is off by up to 0.008 radians.
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    amplitude = config.scaling.amplitude
    if amplitude != 1:  # YaRN: scales queries and keys, so the scores by its square
        cos, sin = cos * amplitude, sin * amplitude
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    # The published weights decide: layouts differ by a permutation of the head's entries.
    if config.layout == "halves":
        a, b = jnp.split(rotated, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        rotated = pairs.reshape(rotated.shape)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def rope_angles(
    positions: jax.Array,  # [B, T]
    rotary_dim: int,  # R
    config: RoPE,
) -> jax.Array:  # [B, T, R / 2] float32, from -pi to pi
    """Return position * theta^(-2i/R) without whole turns; `config.scaling` may change it."""
    if isinstance(config.scaling, LongRoPEScaling) and config.scaling.factors == "by_length":
        return long_rope_angles(positions, rotary_dim, config, rope_angles)
    return wrapped_product(positions, *_rope_turns(config, rotary_dim))


@functools.cache
def _rope_turns(config: RoPE, rotary_dim: int) -> tuple[np.ndarray, np.ndarray]:
    return fixed_point_turns(config.scaling.frequencies(config.theta, rotary_dim))


def fixed_point_turns(frequencies: Frequencies) -> tuple[np.ndarray, np.ndarray]:  # uint32 each
    """Return the high and the low word of frequency / 2 pi, modulo 1, as a 64-bit fraction."""
    words = (frequencies / (2 * math.pi) % 1.0) * 2.0**32
    high = np.floor(words)
    return high.astype(np.uint32), np.floor((words - high) * 2.0**32).astype(np.uint32)


def wrapped_product(
    positions: jax.Array,  # [...]
    high: np.ndarray,  # [pairs]
    low: np.ndarray,  # [pairs]
) -> jax.Array:  # [..., pairs]
    """Return the angles of positions times a fixed-point fraction of a turn."""
    # Padding of a cache has position -1: the sign is set apart, as the product is unsigned.
    magnitude = jnp.abs(positions).astype(jnp.uint32)[..., None]
    high, low = (each.reshape(*(1,) * positions.ndim, -1) for each in (high, low))
    turns = magnitude * high + _high_word_of_product(magnitude, low)
    # Read as a signed number, a fraction above one half is a negative angle.
    signed = jax.lax.bitcast_convert_type(turns, jnp.int32)
    angles = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.where(positions[..., None] < 0, -angles, angles)


def _high_word_of_product(x: jax.Array, y: np.ndarray) -> jax.Array:
    """Return the high word of the 64-bit product of two words, or up to 2 less.

    The dropped carry of the lower parts is at most 2 units, an angle of 3e-9.
    """
    x_high, x_low = x >> HALF_BITS, x & LOW_HALF_MASK
    y_high, y_low = y >> HALF_BITS, y & LOW_HALF_MASK
    middle = ((x_high * y_low) >> HALF_BITS) + ((x_low * y_high) >> HALF_BITS)
    return x_high * y_high + middle

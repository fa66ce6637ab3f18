"""Angles of positions, exact at any position of 32 bits.

In float32, position * frequency is off by 1.5e-3 at position 131,071 and by 8.5e-3 at a million:
what is left of an angle after its whole turns has as few digits as the turns have many. So a
frequency is taken as a fixed-point fraction of a turn, of 64 bits, and the product with a position
modulo 2^64: whole turns overflow, and what is left is exact. Integer arithmetic is the same on all
hardware, and no compiler may reorder or fuse it, as they do with sums of floats.

Rotary embeddings: queries and keys turned by their positions (Su et al. 2021).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.position_config import RoPE
from transformer.attention.rope_scaling import Frequencies, RopeScaling

if TYPE_CHECKING:
    import jax

HALF_WORD_BITS, LOW_HALF_MASK = np.uint32(16), np.uint32(2**16 - 1)
"""Bits of a half of a word, and the lower half: products of halves fit into a word, and a wider one
JAX has with `jax_enable_x64` alone."""


def wrapped_angles(
    positions: jax.Array,  # [...] integers
    frequencies: Frequencies,  # [pairs] radians a position
) -> jax.Array:  # [..., pairs] float32, from -pi to pi
    """Return position * frequency without its whole turns.

    It is off by less than 3e-7: by 2^-24 of pi where it becomes a float32, and again where turns
    become radians.
    """
    high, low = _fixed_point(frequencies / (2 * math.pi))
    size = jnp.abs(positions).astype(jnp.uint32)[..., None]
    lead = (1,) * positions.ndim
    turns = size * high.reshape(*lead, -1) + _high_word(size, low.reshape(*lead, -1))
    # As a signed number, the upper half of a turn is a negative angle.
    signed = jax.lax.bitcast_convert_type(turns, jnp.int32)
    angles = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.where(positions[..., None] < 0, -angles, angles)


def _fixed_point(turns: Frequencies) -> tuple[np.ndarray, np.ndarray]:  # uint32 each
    """Return the upper and the lower word of a fraction of 64 bits; whole turns are left out."""
    words = (turns % 1.0) * 2.0**32
    high = np.floor(words)
    return high.astype(np.uint32), np.floor((words - high) * 2.0**32).astype(np.uint32)


def _high_word(x: jax.Array, y: np.ndarray) -> jax.Array:
    """Return the upper word of the product of two words, or up to 2 less.

    By halves: the carry out of the parts that are left out is at most 2, which is 3e-9 of a turn's
    angle.
    """
    x_high, x_low, y_high, y_low = (
        x >> HALF_WORD_BITS,
        x & LOW_HALF_MASK,
        y >> HALF_WORD_BITS,
        y & LOW_HALF_MASK,
    )
    return (
        x_high * y_high
        + ((x_high * y_low) >> HALF_WORD_BITS)
        + ((x_low * y_high) >> HALF_WORD_BITS)
    )


def rope_angles(
    positions: jax.Array,  # [B, T]
    width: int,  # R
    config: RoPE,
) -> jax.Array:  # [B, T, R / 2] float32
    """position * base^(-2i/R) without whole turns, with the frequencies scaled as configured."""
    pass  # DROPPED

    return wrapped_angles(positions, config.scaling.frequencies(config.theta, width))


def apply_rope(
    x: jax.Array,  # [B, T, N, H]
    positions: jax.Array,  # [B, T]
    config: RoPE,
) -> jax.Array:  # [B, T, N, H]
    """Turns each pair (a, b) of x by its angle: (a cos - b sin, a sin + b cos)."""
    import jax.numpy as jnp

    width = config.rotary_dim(x.shape[-1])
    angles = rope_angles(positions, width, config)[:, :, None, :]
    cos, sin = (_scaled(f(angles), config.scaling).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    turned, rest = x[..., :width], x[..., width:]
    if config.layout == "halves":
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        turned = pairs.reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def _scaled(x: jax.Array, scaling: RopeScaling) -> jax.Array:
    return x if scaling.amplitude == 1 else x * scaling.amplitude

"""Angles of positions, exact at any 32-bit position: for rotary and sinusoidal positions.

In float32, position * frequency is off by 1.5e-3 radians at position 131,071 and by 8.5e-3 at a
million: the more whole turns an angle has, the fewer digits are left for the rest. So a frequency
is stored as a 64-bit fixed-point fraction of a turn, and multiplied by the position modulo 2^64.
Whole turns overflow: the remainder is exact, on all hardware, and no compiler may reorder it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, UInt32

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
"""Radians per position of each pair [R / 2], known at compile time. float64, as an error of a
frequency is multiplied by the position."""


def unscaled_frequencies(theta: float, width: int) -> Frequencies:  # [R / 2]
    """Return theta^(-2i/R) for a width R (Su et al. 2021, section 3.2.2)."""
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    return np.float64(theta) ** -exponents


# A product of two 32-bit words needs 64 bits, which JAX has only with jax_enable_x64. Products of
# 16-bit halves fit into 32 bits.
HALF_BITS, LOW_HALF_MASK = np.uint32(16), np.uint32(2**16 - 1)


def fixed_point_turns(frequencies: Frequencies) -> tuple[np.ndarray, np.ndarray]:  # uint32 each
    """Return the high and the low word of frequency / 2 pi, modulo 1, as a 64-bit fraction."""
    words = (frequencies / (2 * math.pi) % 1.0) * 2.0**32
    high = np.floor(words)
    return high.astype(np.uint32), np.floor((words - high) * 2.0**32).astype(np.uint32)


def wrapped_product(
    positions: Int[Array, "*axes"],
    high: UInt32[np.ndarray, "pairs"],
    low: UInt32[np.ndarray, "pairs"],
) -> Float32[Array, "*axes pairs"]:
    """Return the angles of positions times a fixed-point fraction of a turn."""
    # Padding of a cache has position -1: the sign is set apart, as the product is unsigned.
    magnitude = jnp.abs(positions).astype(jnp.uint32)[..., None]
    axes = (1,) * positions.ndim
    high, low = high.reshape(*axes, -1), low.reshape(*axes, -1)
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

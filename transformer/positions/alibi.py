"""ALiBi: scores fall with the distance, at a fixed slope for each head."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import numpy as np


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """-slope * |i - j|, added to the scores: no weights, and any length (Press et al. 2022)."""


def alibi_slopes(num_heads: int) -> np.ndarray:  # [N]
    """2^(-8 n / N) for head n = 1 to N, as in section 3.

    If N is no power of two: those of the power below it, then every second of twice as many, as in
    the authors' code.
    """
    import numpy as np

    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]])


def alibi_bias(
    num_heads: int,
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S] float32
    """What is added to the scores of each head."""
    import jax.numpy as jnp

    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)[None, :, None, None]
    return -slopes * jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])[:, None]

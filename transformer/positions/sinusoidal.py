"""Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017, section 3.5)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from transformer.positions.scaling.none import unscaled_frequencies

if TYPE_CHECKING:
    import jax


FREQUENCY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions:
    """A fixed vector for each position, of any length: it has no weights."""


def sinusoidal_embedding(
    positions: jax.Array,  # [B or 1, T]
    width: int,  # D
) -> jax.Array:  # [B or 1, T, D] float32
    """Entry 2i is sin(position / 10000^(2i/D)), entry 2i + 1 its cosine.

    Wavelengths run from 2 pi to 2 pi * 10000. A width that is odd ends with a sine.
    """
    import jax.numpy as jnp

    from transformer.positions.angles import wrapped_angles

    angles = wrapped_angles(positions, unscaled_frequencies(FREQUENCY_BASE, width))
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:2], -1)[..., :width]

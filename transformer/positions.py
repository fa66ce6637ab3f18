"""Where a token stands: rotary embeddings, and learned tables."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class NoPosition:
    """The attention itself knows no positions (they may have been added to the embeddings)."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of queries and keys (Su et al. 2021, section 3.2)."""

    base: float = 10_000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    fraction: float = 1.0
    """Share of the head's width that is rotated, from its start."""
    layout: Literal["halves", "interleaved"] = "halves"
    """Which entries are a pair: (i, i + R/2), as in Llama's published weights, or (2i, 2i + 1), as
    in the paper."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rotary.fraction {self.fraction}: give a share in (0, 1]")

    def rotated(self, width: int) -> int:
        """How many of `width` entries are rotated: an even number R."""
        return int(width * self.fraction) // 2 * 2


AttentionPosition = NoPosition | Rotary


def rotary_angles(
    positions: jax.Array,  # [B, T]
    width: int,  # R
    config: Rotary,
) -> jax.Array:  # [B, T, R / 2] float32
    """position * base^(-2i/R)."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    frequencies = config.base**-exponents
    return positions.astype(jnp.float32)[..., None] * frequencies[None, None, :]


def rotate(
    x: jax.Array,  # [B, T, N, H]
    positions: jax.Array,  # [B, T]
    config: Rotary,
) -> jax.Array:  # [B, T, N, H]
    """Turns each pair (a, b) of x by its angle: (a cos - b sin, a sin + b cos)."""
    width = config.rotated(x.shape[-1])
    angles = rotary_angles(positions, width, config)[:, :, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    if config.layout == "halves":
        a, b = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        turned = pairs.reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A learned vector for each position, added to the embedding; longer inputs are refused."""

    length: int = 1024
    """Rows of the table."""


EmbeddingPosition = NoPosition | LearnedPositions

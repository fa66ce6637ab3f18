"""Rotary embeddings: queries and keys turned by their positions (Su et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, get_args

from transformer.checks import check_choice
from transformer.positions.scaling import NoScaling, RopeScaling

if TYPE_CHECKING:
    import jax


RopeLayout = Literal["halves", "interleaved"]


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Rotary embeddings of queries and keys (Su et al. 2021, section 3.2)."""

    theta: float = 10_000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    fraction: float = 1.0
    """Share of the head's width that is rotated, from its start."""
    layout: RopeLayout = "halves"
    """Which entries are a pair: (i, i + R/2), as in Llama's published weights, or (2i, 2i + 1), as
    in the paper."""
    scaling: RopeScaling = NoScaling()
    """How a model that was trained on short inputs is made to read longer ones."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rotary.fraction {self.fraction}: give a share in (0, 1]")
        if self.theta <= 1:
            raise ValueError(f"rotary.base {self.theta}: give more than 1")
        check_choice("rotary.layout", self.layout, get_args(RopeLayout))

    def rotary_dim(self, width: int) -> int:
        """How many of `width` entries are rotated: an even number R."""
        return int(width * self.fraction) // 2 * 2


def rope_angles(
    positions: jax.Array,  # [B, T]
    width: int,  # R
    config: RoPE,
) -> jax.Array:  # [B, T, R / 2] float32
    """position * base^(-2i/R) without whole turns, with the frequencies scaled as configured."""
    from transformer.positions.angles import wrapped_angles

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

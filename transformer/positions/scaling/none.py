"""Rotary frequencies as the paper has them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import jax


def plain_frequencies(base: float, width: int) -> jax.Array:  # [R / 2] float32
    """base^(-2i/R) for a width R (Su et al. 2021, section 3.2.2)."""
    import jax.numpy as jnp

    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    return base**-exponents


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """The context is that of training."""

    amplitude: ClassVar[float] = 1.0

    def frequencies(self, base: float, width: int) -> jax.Array:  # [R / 2]
        return plain_frequencies(base, width)

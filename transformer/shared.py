"""What every module of one model has in common."""

import dataclasses
from collections.abc import Callable

import jax

from transformer.hardware import Hardware
from transformer.precision import Precision
from transformer.weights import Initialization

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def unconstrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Leaves the layout of activations to the compiler."""
    return x


@dataclasses.dataclass(frozen=True)
class Shared:
    """Passed down from a model to its parts, beside each part's own configuration."""

    width: int  # D
    layers: int  # L
    precision: Precision
    initialization: Initialization
    hardware: Hardware
    constrain: Constrain = unconstrained
    """Tells the compiler how an activation with these logical axes lies on the devices."""

"""What every module of one model has in common."""

import dataclasses
from typing import Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from transformer.config import Initialization
from transformer.hardware import Hardware
from transformer.precision import AUTO, Precision


class ActivationConstraint(Protocol):
    """How activations lie on the devices, by the names of their axes; a hashable value."""

    @property
    def mesh(self) -> Mesh | None:
        """The devices; None if there is but one."""

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """x, laid so that these axes of it are split; those that do not divide stay whole."""

    def num_shards(self, axis: str) -> int:
        """How many parts an axis is split into."""

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The axes of the mesh over which an array of this shape is split, for `shard_map`."""


@dataclasses.dataclass(frozen=True)
class _Unconstrained:
    """Leaves the layout of activations to the compiler."""

    mesh: None = None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return x

    def num_shards(self, axis: str) -> int:
        return 1

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec()


unconstrained = _Unconstrained()


@dataclasses.dataclass(frozen=True)
class ModelContext:
    """Passed down from a model to its parts, beside each part's own configuration."""

    d_model: int  # D
    num_layers: int  # L
    precision: Precision
    initialization: Initialization
    hardware: Hardware
    constrain: ActivationConstraint = unconstrained
    """Tells the compiler how an activation with these logical axes lies on the devices."""

    def __post_init__(self) -> None:
        if self.precision.compute == AUTO:
            raise ValueError(
                "precision auto: is decided by the trainer for its hardware; give a model "
                "config.precision.on(hardware), or a policy by name such as bfloat16"
            )

    @property
    def flatten_tokens(self) -> bool:
        """Whether products take [B, T, D] as [B T, D].

        Where it is faster, and not where T is spread over devices: one axis of both would have to
        be gathered first.
        """
        return self.hardware.flatten_tokens and self.constrain.num_shards("length") == 1

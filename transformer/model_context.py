"""Values that all modules of one model share."""

import dataclasses
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from transformer.config import Initialization
from transformer.hardware import Hardware
from transformer.precision import AUTO, Precision


class ActivationConstraint(Protocol):
    """Sharding of activations by logical axis names. Implementations are hashable values."""

    @property
    def mesh(self) -> Mesh | None:
        """Device mesh; None on a single device."""

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Return x constrained to be sharded along these axes; uneven axes stay unsharded."""

    def num_shards(self, axis: str) -> int:
        """Return the number of shards of a logical axis."""

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """Return the mesh axes that shard an array of this shape, for `jax.shard_map`."""


@dataclasses.dataclass(frozen=True)
class _Unconstrained:
    """No constraints: the compiler chooses the layout of activations."""

    mesh: None = None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return x

    def num_shards(self, axis: str) -> int:
        return 1

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec()


unconstrained = _Unconstrained()


def replicate(constrain: ActivationConstraint, arrays: Any) -> Any:
    """Return a tree of arrays whole on every device, so that each host can read them."""
    return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim), arrays)


@dataclasses.dataclass(frozen=True)
class ModelContext:
    """Settings passed from a model to all its modules, beside each module's own configuration."""

    d_model: int  # D
    num_layers: int  # L
    precision: Precision
    initialization: Initialization
    hardware: Hardware
    constrain: ActivationConstraint = unconstrained

    def __post_init__(self) -> None:
        if self.precision.compute == AUTO:
            raise ValueError(
                "precision auto: is resolved by the trainer for its hardware; give a model "
                "config.precision.resolve(hardware), or a policy by name such as bfloat16"
            )

    @property
    def flatten_tokens(self) -> bool:
        """True if matrix products take [B, T, D] as [B T, D].

        For the gradient of a 3-D product, XLA's CPU compiler transposes copies, at twice the cost.
        Not if T is sharded: merging B and T would gather T first.
        """
        return self.hardware.platform == "cpu" and self.constrain.num_shards("length") == 1

"""Where activations lie: what a model is told of the mesh, as one value."""

import dataclasses

import jax
from jax.sharding import Mesh, PartitionSpec

from train.sharding.rules import logical_to_sharding, num_shards
from transformer.shared import ActivationConstraint


def make_sharding_constraint(mesh: Mesh) -> ActivationConstraint:
    """What a model calls to say how its activations lie; nothing is said on one device.

    Nor of an axis that does not divide: a model that was trained on many devices takes a single
    example too.
    """
    return _ShardingConstraint(mesh if mesh.size > 1 else None)


@dataclasses.dataclass(frozen=True)
class _ShardingConstraint:
    """Hashable, so that models with it are."""

    mesh: Mesh | None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        if self.mesh is None:
            return x
        sharding = logical_to_sharding(self.mesh, self._fitting(axes, x.shape))
        return jax.lax.with_sharding_constraint(x, sharding)

    def num_shards(self, axis: str) -> int:
        return 1 if self.mesh is None else num_shards(self.mesh, axis)

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        if self.mesh is None:
            return PartitionSpec()
        return logical_to_sharding(self.mesh, self._fitting(axes, shape)).spec

    def _fitting(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        """The axes that divide."""
        sizes = zip(axes, shape, strict=True)
        return tuple(
            name if name and size % self.num_shards(name) == 0 else None for name, size in sizes
        )

"""Where activations lie: what a model is told of the mesh, as one value."""

import dataclasses

import jax
from jax.sharding import Mesh, PartitionSpec

from train.sharding.rules import partition, parts
from transformer.shared import Constrain


def constrain_to(mesh: Mesh) -> Constrain:
    """What a model calls to say how its activations lie; nothing is said on one device.

    Nor of an axis that does not divide: a model that was trained on many devices takes a single
    example too.
    """
    return _Constrain(mesh if mesh.size > 1 else None)


@dataclasses.dataclass(frozen=True)
class _Constrain:
    """Hashable, so that models with it are."""

    mesh: Mesh | None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        if self.mesh is None:
            return x
        sharding = partition(self.mesh, self._fitting(axes, x.shape))
        return jax.lax.with_sharding_constraint(x, sharding)

    def parts(self, axis: str) -> int:
        return 1 if self.mesh is None else parts(self.mesh, axis)

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        if self.mesh is None:
            return PartitionSpec()
        return partition(self.mesh, self._fitting(axes, shape)).spec

    def _fitting(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        """The axes that divide."""
        sizes = zip(axes, shape, strict=True)
        return tuple(
            name if name and size % self.parts(name) == 0 else None for name, size in sizes
        )

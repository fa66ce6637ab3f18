"""Sharding of activations: the constraint that a model applies between its layers.

XLA infers the sharding of every array that is not constrained, by propagation from those that are.
Batch and weights are both split over `fsdp`, so a product of them has two readings: gather the
weights, or gather the activations and keep the weights in shards. Constraining activations to the
axes of the batch leaves only the first one.
"""

import dataclasses

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from train.parallel.sharding import logical_to_sharding, num_shards
from transformer.context import ActivationConstraint, unconstrained


def make_sharding_constraint(mesh: Mesh) -> ActivationConstraint:
    """Return the function with which a model constrains the sharding of its activations.

    It does nothing on one device, and leaves axes whole that do not divide: a model trained on many
    devices also runs on a single example.
    """
    if mesh.size == 1:
        return unconstrained
    # Models run with automatic axes, whatever the axes of their inputs are.
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return _ShardingConstraint(Mesh(mesh.devices, mesh.axis_names, axis_types=auto))


@dataclasses.dataclass(frozen=True)
class _ShardingConstraint:
    """Constraint of activations to a mesh. Hashable, as the modules that hold it must be."""

    mesh: Mesh

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        # Inside `jit` this is a hint that moves data where needed, and never a change of values.
        sharding = logical_to_sharding(self.mesh, self._divisible_axes(axes, x.shape))
        return jax.lax.with_sharding_constraint(x, sharding)

    def num_shards(self, axis: str) -> int:
        return num_shards(self.mesh, axis)

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return logical_to_sharding(self.mesh, self._divisible_axes(axes, shape)).spec

    def _divisible_axes(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        """Return the axes with None for each that its number of shards does not divide."""
        # Parameters that do not divide are an error. Activations are not: prompts have any length,
        # and `sample` has a batch of one.
        sizes = zip(axes, shape, strict=True)
        return tuple(
            name if name and size % self.num_shards(name) == 0 else None for name, size in sizes
        )

"""One table from logical axes to mesh axes, and what it makes of an array.

Which memory arrays lie in: that of the device, or that of its host.

Where activations lie: what a model is told of the mesh, as one value.

Where weights and the optimizer's state lie.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.errors import UsageError
from train.parallel.mesh import MeshConfig
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware
from transformer.layers.logical_axes import LogicalAxes

LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "experts": ("expert",),
}
"""Logical axis -> mesh axes that it is split over; an axis that is not here is not split."""


REPLICABLE_AXES = ("kv_heads",)
"""Axes that every part has whole where there are more parts than entries: keys and values that
several heads of queries share are copied to each part that has one of these heads."""


def logical_to_sharding(
    mesh: Mesh, names: Sequence[str | None], shape: Sequence[int] = ()
) -> NamedSharding:
    """The layout of an array with these logical axes. Raises UsageError for what cannot divide."""
    used: set[str] = set()
    spec: list[Any] = []
    for index, name in enumerate(names):
        axes = tuple(axis for axis in mesh_axes(mesh, name) if axis not in used)
        count = math.prod(mesh.shape[axis] for axis in axes)
        if shape and shape[index] % count:
            if name not in REPLICABLE_AXES or count % shape[index]:
                raise UsageError(_indivisible(mesh, name, shape[index], axes, count))
            axes = ()
        used.update(axes)
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _indivisible(mesh: Mesh, name: str | None, size: int, axes: tuple[str, ...], count: int) -> str:
    shown = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    fitting = [str(each) for each in range(1, count) if size % each == 0]
    settings = " x ".join(f"mesh.{axis}" for axis in axes)
    return (
        f"axis {name} of size {size}: does not divide into {count} parts (mesh {shown}); "
        f"give {settings} of {' or '.join(fitting)}"
    )


def mesh_axes(mesh: Mesh, name: str | None) -> tuple[str, ...]:
    """The mesh axes that a logical axis is split over, those of one device left out."""
    return tuple(
        axis for axis in LOGICAL_AXIS_RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1
    )


def num_shards(mesh: Mesh, name: str | None) -> int:
    """How many parts a logical axis is split into."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(mesh, name))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """The layout of an array that every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def check_optimizer_placement(mesh: MeshConfig, hardware: Hardware) -> None:
    """Raises UsageError if the devices have no other memory than the host's."""
    if mesh.optimizer_placement == "host" and hardware.platform == "cpu":
        raise UsageError(
            "mesh.optimizer_placement host: a CPU computes in the host's memory already; "
            "set it to device"
        )


def host_memory_shardings(shardings: Any) -> Any:
    """The same layouts, in memory of the host that devices can reach by themselves.

    Raises UsageError for GPUs that are only described: JAX knows of no other memory there.
    """
    there = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
    if any(sharding.memory_kind is None for sharding in jax.tree.leaves(there)):
        raise UsageError(
            "mesh.optimizer_placement host: no step can be compiled with it for GPUs that are not "
            "here, as their description lacks the host's memory; give --compile-best 0 for an estimate"
        )
    return there


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


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """The layout of each parameter, from the names of its axes."""
    return jax.tree.map(
        lambda a, s: logical_to_sharding(mesh, a.names, s.shape),
        axes,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, LogicalAxes),
    )


def optimizer_state_shardings(state: Any, shapes: Any, shardings: Any, rest: NamedSharding) -> Any:
    """The layout of an optimizer's state.

    What belongs to a parameter, by its path, lies like it: all of it if it has its shape; if not
    (means over rows, scales of blocks), the axes that it shares in order, where they divide. The
    rest (counts, coefficients) lies as `operands_and_attributes` says.
    """
    known = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    }

    def layout(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _names(path)
        ends = (names[start:] for start in range(len(names)))
        found = next((known[end] for end in ends if end in known), None)
        if found is None:
            return rest
        shape, sharding = found
        return sharding if leaf.shape == shape else _fitted(sharding, leaf.shape)

    return jax.tree_util.tree_map_with_path(layout, state)


def _fitted(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout of an array of another shape: axis by axis, where the parts divide it."""
    parts = lambda axes: math.prod(sharding.mesh.shape[axis] for axis in axes or ())  # noqa: E731
    spec = [
        axes if size % parts((axes,) if isinstance(axes, str) else axes) == 0 else None
        for axes, size in zip(sharding.spec, shape, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)

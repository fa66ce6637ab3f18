"""Placement of arrays: one table from logical axes to mesh axes, and the shardings that follow.

Every weight and activation has logical axes ("embed", "mlp", "batch", ...). `LOGICAL_AXIS_RULES`
maps each to the mesh axes that split it. From it follow the shardings of parameters, optimizer
state, activations and batches; no other file names a mesh axis to split an array.
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
"""Logical axis -> mesh axes that split it. Axes that are not listed are not split."""

REPLICABLE_AXES = ("kv_heads",)
"""Axes that are replicated if they have fewer entries than shards. Key-value heads are shared by
several query heads: each shard gets the key-value heads of its query heads."""


def logical_to_sharding(
    mesh: Mesh, names: Sequence[str | None], shape: Sequence[int] = ()
) -> NamedSharding:
    """Return the sharding of an array with these logical axes.

    Args:
      mesh: The devices.
      names: Logical axis of each dimension; None: not split.
      shape: Sizes to check. Without them nothing is checked.

    Raises:
      UsageError: a size is not divisible by the number of its shards.
    """
    # A mesh axis can split one dimension only: the first that asks for it.
    used: set[str] = set()
    spec: list[Any] = []
    for index, name in enumerate(names):
        axes = tuple(axis for axis in mesh_axes(mesh, name) if axis not in used)
        count = math.prod(mesh.shape[axis] for axis in axes)
        if shape and shape[index] % count:
            if name not in REPLICABLE_AXES or count % shape[index]:
                raise UsageError(_indivisible_message(mesh, name, shape[index], axes, count))
            axes = ()
        used.update(axes)
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _indivisible_message(
    mesh: Mesh, name: str | None, size: int, axes: tuple[str, ...], count: int
) -> str:
    sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    divisors = [str(each) for each in range(1, count) if size % each == 0]
    fields = " x ".join(f"mesh.{axis}" for axis in axes)
    return (
        f"axis {name} of size {size}: does not divide into {count} parts (mesh {sizes}); "
        f"give {fields} of {' or '.join(divisors)}"
    )


def mesh_axes(mesh: Mesh, name: str | None) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that split a logical axis."""
    return tuple(
        axis for axis in LOGICAL_AXIS_RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1
    )


def num_shards(mesh: Mesh, name: str | None) -> int:
    """Return the number of shards of a logical axis."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(mesh, name))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def check_optimizer_placement(mesh: MeshConfig, hardware: Hardware) -> None:
    """Raise UsageError for host placement on devices that have no memory of their own."""
    if mesh.optimizer_placement == "host" and hardware.platform == "cpu":
        raise UsageError(
            "mesh.optimizer_placement host: a CPU computes in the host's memory already; "
            "set it to device"
        )


def host_memory_shardings(shardings: Any) -> Any:
    """Return the same shardings in pinned host memory, which devices access directly.

    Raises:
      UsageError: the devices are a described GPU topology, which lacks this memory in JAX.
    """
    pinned = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
    if any(sharding.memory_kind is None for sharding in jax.tree.leaves(pinned)):
        raise UsageError(
            "mesh.optimizer_placement host: cannot be compiled for GPUs that are not here, since "
            "their description lacks host memory; give --compile-best 0 for an estimate"
        )
    return pinned


def make_sharding_constraint(mesh: Mesh) -> ActivationConstraint:
    """Return the function by which a model constrains the sharding of its activations.

    It does nothing on one device, and leaves axes whole that do not divide: a model trained on many
    devices also runs on a single example.
    """
    return _ShardingConstraint(mesh if mesh.size > 1 else None)


@dataclasses.dataclass(frozen=True)
class _ShardingConstraint:
    """Constraint of activations to a mesh. Hashable, as the modules that hold it must be."""

    mesh: Mesh | None

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        if self.mesh is None:
            return x
        sharding = logical_to_sharding(self.mesh, self._divisible_axes(axes, x.shape))
        return jax.lax.with_sharding_constraint(x, sharding)

    def num_shards(self, axis: str) -> int:
        return 1 if self.mesh is None else num_shards(self.mesh, axis)

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        if self.mesh is None:
            return PartitionSpec()
        return logical_to_sharding(self.mesh, self._divisible_axes(axes, shape)).spec

    def _divisible_axes(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        """Return the axes with None for each that its number of shards does not divide."""
        sizes = zip(axes, shape, strict=True)
        return tuple(
            name if name and size % self.num_shards(name) == 0 else None for name, size in sizes
        )


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Return the sharding of every parameter, from its logical axes."""
    return jax.tree.map(
        lambda a, s: logical_to_sharding(mesh, a.names, s.shape),
        axes,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, LogicalAxes),
    )


def optimizer_state_shardings(
    state: Any, shapes: Any, shardings: Any, default: NamedSharding
) -> Any:
    """Return the sharding of every array of an optimizer state.

    optax keeps moments in trees with the structure of the parameters, inside states of its own: a
    leaf whose path ends with the path of a parameter belongs to it. It gets the parameter's
    sharding if it has its shape. Otherwise (row means, scales of blocks) it gets the sharding of
    the leading axes that both have, where they divide.

    Args:
      state: Shapes of the optimizer state.
      shapes: Shapes of the parameters.
      shardings: Shardings of the parameters.
      default: Sharding of leaves that belong to no parameter (step counts, coefficients).
    """
    by_path = {
        _path_names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    }

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _path_names(path)
        suffixes = (names[start:] for start in range(len(names)))
        parameter = next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)
        if parameter is None:
            return default
        shape, sharding = parameter
        return sharding if leaf.shape == shape else _leading_axes(sharding, leaf.shape)

    return jax.tree_util.tree_map_with_path(leaf_sharding, state)


def _leading_axes(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding for another shape: axis by axis, where the number of shards divides."""
    spec = []
    for axes, size in zip(sharding.spec, shape, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        shards = math.prod(sharding.mesh.shape[name] for name in names)
        spec.append(axes if size % shards == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)

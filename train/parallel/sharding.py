"""Placement of arrays: one table from logical axes to mesh axes, and the shardings that follow.

Every weight and activation has logical axes ("embed", "mlp", "batch", ...). `LOGICAL_AXIS_RULES`
maps each to the mesh axes that split it. From it follow the shardings of batches
(`batches.py`), parameters and optimizer state (`state_sharding.py`), and activations
(`activation_sharding.py`): no other file names a mesh axis to split an array.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.errors import UsageError

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

"""One table from logical axes to mesh axes, and what it makes of an array."""

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

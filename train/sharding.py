"""Where arrays lie: one mesh, and one table from logical axes to its axes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.errors import UsageError
from transformer.weights import Axes

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
}
"""Logical axis -> mesh axes that it is split over; an axis that is not here is not split."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged. At most one size may be -1: the devices that are left."""

    data: int = -1
    """Copies of the model, each with its part of the batch."""
    fsdp: int = 1
    """Parts that weights and optimizer state are cut into, gathered when needed; the batch too."""
    tensor: int = 1
    """Parts that heads, hidden units and vocabulary are cut into."""

    def sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis. Raises UsageError if they cannot be that many devices."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        rest = [name for name, size in sizes.items() if size == -1]
        if len(rest) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise UsageError(f"mesh {shown}: give sizes of 1 or more, and -1 at most once")
        known = math.prod(size for size in sizes.values() if size != -1)
        if rest:
            sizes[rest[0]] = devices // known
        if math.prod(sizes.values()) != devices:
            raise UsageError(
                f"mesh {shown}: does not divide {devices} devices; give sizes whose product is "
                f"{devices}, or -1 for the rest"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices` (all there are, if None)."""
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def partition(mesh: Mesh, names: Sequence[str | None], shape: Sequence[int] = ()) -> NamedSharding:
    """The layout of an array with these logical axes. Raises UsageError for what cannot divide."""
    used: set[str] = set()
    spec: list[Any] = []
    for index, name in enumerate(names):
        axes = tuple(axis for axis in _split_over(mesh, name) if axis not in used)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape and shape[index] % parts:
            raise UsageError(
                f"axis {name} of size {shape[index]}: does not divide into {parts} parts "
                f"(mesh {' x '.join(axes)}); give a mesh size that divides {shape[index]}"
            )
        used.update(axes)
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _split_over(mesh: Mesh, name: str | None) -> tuple[str, ...]:
    """The mesh axes that a logical axis is split over, those of one device left out."""
    return tuple(axis for axis in RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1)


def constrain_to(mesh: Mesh) -> Callable[[jax.Array, tuple[str | None, ...]], jax.Array]:
    """What a model calls to say how its activations lie; nothing is said on one device.

    Nor of an axis that does not divide: a model that was trained on many devices takes a single
    example too.
    """
    return _Constrain(mesh)


@dataclasses.dataclass(frozen=True)
class _Constrain:
    """Hashable, so that models with it are."""

    mesh: Mesh

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        if self.mesh.size == 1:
            return x
        fitting = tuple(
            name
            if size % math.prod(self.mesh.shape[a] for a in _split_over(self.mesh, name)) == 0
            else None
            for name, size in zip(axes, x.shape, strict=True)
        )
        return jax.lax.with_sharding_constraint(x, partition(self.mesh, fitting))


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """The layout of each parameter, from the names of its axes."""
    return jax.tree.map(
        lambda a, s: partition(mesh, a.names, s.shape),
        axes,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, Axes),
    )


def like_parameters(state: Any, shapes: Any, shardings: Any, rest: NamedSharding) -> Any:
    """The layout of an optimizer's state.

    What belongs to a parameter, by its path, lies like it: all of it if it has its shape; if not
    (means over rows, scales of blocks), the axes that it shares in order, where they divide. The
    rest (counts, coefficients) lies as `rest` says.
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


def replicated(mesh: Mesh) -> NamedSharding:
    """The layout of an array that every device has whole."""
    return NamedSharding(mesh, PartitionSpec())


def place_batch(mesh: Mesh, rows: dict[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
    """This host's rows of a batch -> the whole batch, spread over the devices of all hosts."""

    def place(array: np.ndarray) -> jax.Array:
        names = ("batch", *(None,) * (array.ndim - 1))
        sharding = partition(mesh, names)
        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: place(array) for name, array in rows.items()}

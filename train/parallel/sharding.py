"""Placement of arrays: one table from logical axes to mesh axes, and the shardings that follow.

Every weight and activation has logical axes ("embed", "mlp", "batch", ...). `LOGICAL_AXIS_RULES`
maps each to the mesh axes that split it. From it follow the shardings of batches (`shard_batch`),
parameters, optimizer state and activations (`model_sharding.py`): no other file names a mesh axis
to split an array.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
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
"""Logical axis -> mesh axes that split it. Axes that are not listed are not split.

- Weights are split over `fsdp` along "embed", the one axis that nearly all matrices have. The batch
  is split over it too: devices of one fsdp group compute different rows and gather the weights of a
  layer when they reach it (Rajbhandari et al. 2020, ZeRO stage 3).
- The batch is split over `expert` as well: otherwise all devices of an expert group would compute
  the same attention.
- "heads" and "mlp" are the outputs of one matrix and the inputs of the next. Split alike, a block
  needs one all-reduce, after the second (Shoeybi et al. 2019, section 3)."""

REPLICABLE_AXES = ("kv_heads",)
"""Axes that are replicated if they have fewer entries than shards. Key-value heads are shared by
several query heads: each shard gets the key-value heads of its query heads."""

HostBatch = dict[str, np.ndarray]
"""One host's rows of a batch: arrays [B] of examples or [B, T] of tokens."""


def shard_batch(mesh: Mesh, rows: HostBatch) -> dict[str, jax.Array]:
    """Return the global batch of which this host has `rows`. All hosts have equally many.

    Rows are split over the batch axes of the mesh, and the tokens of a row over its context axis.
    """
    if (context_shards := num_shards(mesh, "length")) > 1:
        # Imported here, because it imports this file.
        from train.parallel.context_parallel import zigzag_reorder

        rows = zigzag_reorder(rows, context_shards)

    def place(array: np.ndarray) -> jax.Array:
        # `examples` [B], or tokens [B, T, ...].
        names = ("batch", "length")[: array.ndim] + (None,) * (array.ndim - 2)
        sharding = logical_to_sharding(mesh, names)
        # The global shape is given, not inferred: if the mesh did not split rows over hosts, JAX
        # would take one host's rows for the whole batch without an error.
        shape = (len(array) * jax.process_count(), *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: place(array) for name, array in rows.items()}


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
    # An attention output [batch, length, embed] has its batch split over `fsdp`, so "embed" is not.
    used: set[str] = set()
    spec: list[Any] = []
    for index, name in enumerate(names):
        axes = tuple(axis for axis in mesh_axes(mesh, name) if axis not in used)
        count = math.prod(mesh.shape[axis] for axis in axes)
        if shape and shape[index] % count:
            # An axis that divides the shards evenly may be whole on each of them.
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
    # Axes of one device split nothing. Without them, a sharding and an error name what matters.
    return tuple(
        axis for axis in LOGICAL_AXIS_RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1
    )


def num_shards(mesh: Mesh, name: str | None) -> int:
    """Return the number of shards of a logical axis."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(mesh, name))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())

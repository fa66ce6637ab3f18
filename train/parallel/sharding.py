"""Placement of arrays: one table from logical axes to mesh axes, and the shardings that follow.

Every weight and activation has logical axes ("embed", "mlp", "batch", ...). `LOGICAL_AXIS_RULES`
maps each to the mesh axes that split it. From it follow the shardings of batches (`jit_engine.py`),
parameters, optimizer state and activations (`model_sharding.py`): no other file names a mesh axis
to split an array.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def logical_to_sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array whose dimensions have these logical axes; None: not split."""
    # A mesh axis can split one dimension only: the first that asks for it.
    # An attention output [batch, length, embed] has its batch split over `fsdp`, so "embed" is not.
    used: set[str] = set()
    spec: list[Any] = []
    for name in names:
        axes = tuple(axis for axis in mesh_axes(mesh, name) if axis not in used)
        used.update(axes)
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


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

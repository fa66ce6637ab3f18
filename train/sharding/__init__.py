"""Where arrays lie: one mesh, and one table from logical axes to its axes.

The names below are imported when they are first asked for: `MeshConfig` is a setting, read before
JAX is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.sharding.activations import make_sharding_constraint
    from train.sharding.batches import (
        check_batch_divides,
        num_batch_shards,
        shard_batch,
        zigzag_reorder,
    )
    from train.sharding.memory import check_optimizer_placement, host_memory_shardings
    from train.sharding.mesh import MeshConfig, make_mesh
    from train.sharding.rules import (
        LOGICAL_AXIS_RULES,
        logical_to_sharding,
        num_shards,
        replicated_sharding,
    )
    from train.sharding.state import optimizer_state_shardings, parameter_shardings

_HOMES = {
    "activations": ("make_sharding_constraint",),
    "batches": ("check_batch_divides", "zigzag_reorder", "shard_batch", "num_batch_shards"),
    "memory": ("check_optimizer_placement", "host_memory_shardings"),
    "mesh": ("MeshConfig", "make_mesh"),
    "rules": ("LOGICAL_AXIS_RULES", "logical_to_sharding", "num_shards", "replicated_sharding"),
    "state": ("optimizer_state_shardings", "parameter_shardings"),
}
"""The names of each module."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LOGICAL_AXIS_RULES",
    "MeshConfig",
    "check_batch_divides",
    "check_optimizer_placement",
    "make_sharding_constraint",
    "host_memory_shardings",
    "zigzag_reorder",
    "optimizer_state_shardings",
    "make_mesh",
    "parameter_shardings",
    "logical_to_sharding",
    "num_shards",
    "shard_batch",
    "replicated_sharding",
    "num_batch_shards",
]


def __getattr__(name: str) -> Any:
    """Import each name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

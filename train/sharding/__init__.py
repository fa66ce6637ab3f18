"""Where arrays lie: one mesh, and one table from logical axes to its axes.

The names below are imported when they are first asked for: `MeshConfig` is a setting, read before
JAX is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.sharding.activations import constrain_to
    from train.sharding.batches import check_batches, in_turn, place_batch, row_parts
    from train.sharding.memory import check_memory, in_host_memory
    from train.sharding.mesh import MeshConfig, make_mesh
    from train.sharding.rules import RULES, partition, parts, replicated
    from train.sharding.state import like_parameters, parameter_shardings

_HOMES = {
    "activations": ("constrain_to",),
    "batches": ("check_batches", "in_turn", "place_batch", "row_parts"),
    "memory": ("check_memory", "in_host_memory"),
    "mesh": ("MeshConfig", "make_mesh"),
    "rules": ("RULES", "partition", "parts", "replicated"),
    "state": ("like_parameters", "parameter_shardings"),
}
"""The names of each module."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "RULES",
    "MeshConfig",
    "check_batches",
    "check_memory",
    "constrain_to",
    "in_host_memory",
    "in_turn",
    "like_parameters",
    "make_mesh",
    "parameter_shardings",
    "partition",
    "parts",
    "place_batch",
    "replicated",
    "row_parts",
]


def __getattr__(name: str) -> Any:
    """Import each name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

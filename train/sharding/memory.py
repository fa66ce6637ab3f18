"""Which memory arrays lie in: that of the device, or that of its host."""

from typing import Any

import jax

from train.errors import UsageError
from train.sharding.mesh import MeshConfig
from transformer.hardware import Hardware


def check_optimizer_placement(mesh: MeshConfig, hardware: Hardware) -> None:
    """Raises UsageError if the devices have no other memory than the host's."""
    if mesh.optimizer_placement == "host" and hardware.platform == "cpu":
        raise UsageError(
            "mesh.optimizer host: a CPU computes in the host's memory already; set it to device"
        )


def host_memory_shardings(shardings: Any) -> Any:
    """The same layouts, in memory of the host that devices can reach by themselves.

    Raises UsageError for GPUs that are only described: JAX knows of no other memory there.
    """
    there = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
    if any(sharding.memory_kind is None for sharding in jax.tree.leaves(there)):
        raise UsageError(
            "mesh.optimizer host: no step can be compiled with it for GPUs that are not here, as "
            "their description lacks the host's memory; give --compile-best 0 for an estimate"
        )
    return there

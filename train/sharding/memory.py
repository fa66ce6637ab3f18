"""Which memory arrays lie in: that of the device, or that of its host."""

from typing import Any

import jax

from train.errors import UsageError
from train.sharding.mesh import MeshConfig
from transformer.hardware import Hardware


def check_memory(mesh: MeshConfig, hardware: Hardware) -> None:
    """Raises UsageError if the devices have no other memory than the host's."""
    if mesh.optimizer == "host" and hardware.platform == "cpu":
        raise UsageError(
            "mesh.optimizer host: a CPU computes in the host's memory already; set it to device"
        )


def in_host_memory(shardings: Any) -> Any:
    """The same layouts, in memory of the host that devices can reach by themselves."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)

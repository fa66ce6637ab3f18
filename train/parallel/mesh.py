"""The device mesh: how devices are arranged for data, model and sequence parallelism."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from train.errors import UsageError
from train.settings import Settings
from transformer.validation import Mark

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

# Per step and device: `data` sends gradients once, `fsdp` all weights twice, `context` keys and
# values in every layer, `tensor` activations four times in every layer, and waits for them.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh axes from the slowest links to the fastest. Devices along the last axis communicate most and
are placed closest to each other. Pipeline stages, which communicate least, would come first."""


@dataclasses.dataclass(frozen=True)
class MeshConfig(Settings, part="mesh"):
    """Size of each mesh axis. One of them may be -1: all remaining devices."""

    data: Annotated[int, Mark.COMMON] = -1
    """Data parallelism: replicas of the model, each with its part of the batch."""
    fsdp: Annotated[int, Mark.COMMON] = 1
    """Fully sharded data parallelism: shards of weights and optimizer state, gathered when needed.
    Splits the batch too."""
    tensor: Annotated[int, Mark.COMMON] = 1
    """Tensor parallelism: shards of attention heads, hidden units and the vocabulary."""
    context: int = 1
    """Context parallelism: shards of the tokens of each sequence."""
    expert: int = 1
    """Expert parallelism: shards of the experts of mixture layers. Splits the batch too."""
    optimizer_placement: Literal["device", "host"] = "device"
    """Memory that holds the optimizer state between steps. host: larger, but every step transfers
    the state to the device and back."""

    def axis_sizes(self, num_devices: int) -> dict[str, int]:
        """Return the size of each axis, in the order of `MESH_AXES`.

        Raises:
          UsageError: the sizes do not multiply to the number of devices.
        """
        names = [f.name for f in dataclasses.fields(self) if f.name in MESH_AXES]
        # For messages, in the order of the fields: the order in which people give them.
        requested = {name: getattr(self, name) for name in names}
        common = ("data", "fsdp", "tensor")
        text = " x ".join(
            f"{n} {size}" for n, size in requested.items() if n in common or size != 1
        )
        sizes = {name: requested[name] for name in MESH_AXES}
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise UsageError(f"mesh {text}: give sizes of 1 or more, and -1 at most once")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free:
            sizes[free[0]] = num_devices // fixed
        if math.prod(sizes.values()) != num_devices:
            raise UsageError(
                f"mesh {text}: does not divide {num_devices} devices; give sizes whose product is "
                f"{num_devices}, or -1 for the rest"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: "Sequence[jax.Device] | None" = None) -> "Mesh":
    """Return the mesh over `devices`, by default all.

    On a TPU torus an axis runs along a dimension of the torus where it can. An axis of size 2 on a
    4 x 4 torus takes half of a dimension, and another axis may take the other half.
    """
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    devices = jax.devices() if devices is None else devices
    # A mesh that ignores the slices would send the traffic of every axis over the slow network.
    # Of TPUs alone: GPUs number their nodes so, and their collectives do use the network.
    slices = {getattr(each, "slice_index", 0) for each in devices if each.platform == "tpu"}
    if len(slices) > 1:
        raise UsageError(
            f"mesh: the TPUs are of {len(slices)} slices joined by a data-centre network, and "
            "no mesh axis spans slices yet; start a run on one slice"
        )
    sizes = config.axis_sizes(len(devices))
    # Not `jax.make_mesh`: of all TPUs it splits a dimension of the torus on v5e alone.
    arranged = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    # Auto: the compiler propagates shardings from the constraints of parameters and activations.
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

"""How devices are arranged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from train.errors import UsageError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""From the slowest links to the fastest: neighbours along the last axis talk most, and lie closest.
Stages of a pipeline, which talk least, would stand first."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The size of each axis, of which at most one may be -1: the devices that are left."""

    data: int = -1
    """Copies of the model, each with its part of the batch."""
    fsdp: int = 1
    """Parts that weights and optimizer state are cut into, gathered when needed; the batch too."""
    tensor: int = 1
    """Parts that heads, hidden units and vocabulary are cut into."""
    context: int = 1
    """Parts that the tokens of a sequence are cut into."""
    expert: int = 1
    """Parts that the experts of a mixture are cut into; the batch too."""
    optimizer_placement: Literal["device", "host"] = "device"
    """Where the optimizer's state lies: with the weights, or in the host's memory, which is larger
    and slower to reach."""

    def axis_sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis. Raises UsageError if they cannot be that many devices."""
        given = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in MESH_AXES
        }
        often = ("data", "fsdp", "tensor")
        shown = " x ".join(f"{n} {size}" for n, size in given.items() if n in often or size != 1)
        sizes = {name: given[name] for name in MESH_AXES}
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
    """The mesh over `devices` (all there are, if None).

    On a torus each axis lies along dimensions of it where it can; one of 2 on a torus of 4 x 4
    takes half of a dimension, and another axis the other half.
    """
    import jax
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh

    devices = jax.devices() if devices is None else devices
    sizes = config.axis_sizes(len(devices))
    laid = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    return Mesh(laid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

"""Flags of XLA that let communication and computation overlap: in one place, each with its reason.

They are read once, when a backend starts, from the environment: `XLA_FLAGS`, which every backend
reads, and `LIBTPU_INIT_ARGS`, which the TPU's library alone reads. Both end the process over a name
that they do not know, so only names belong here that all supported versions have. A flag that the
user has set is left as it is.
"""

import os
import pathlib
from collections.abc import Mapping, MutableMapping

TPU_FLAGS: Mapping[str, str] = {
    # Gathers of the weights of fsdp run beside the products of the layer before.
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    # A gather may go on over several products, when one is too short to hide it.
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    # Work of the cores and of the links is scheduled together: neither waits for the other.
    "xla_tpu_overlap_compute_collective_tc": "true",
    # The sums of gradients over `data` wait for nothing: the backward pass goes on.
    "xla_enable_async_all_reduce": "true",
    "xla_enable_async_collective_permute": "true",
}
"""Of LIBTPU_INIT_ARGS."""


GPU_FLAGS: Mapping[str, str] = {
    # Collectives are scheduled beside products, by an estimate of how long each takes.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # The gather for the next layer of a scan begins during this one, as its sum of gradients ends.
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    # Two turns of a loop have buffers of their own, so that one can be filled while one is read.
    "xla_gpu_enable_while_loop_double_buffering": "true",
}
"""Of XLA_FLAGS."""


def set_overlap_flags(platform: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Adds the flags of a platform to the environment; before the backend starts.

    Args:
      platform: `tpu`, `gpu` or another, for which there are none.
      environment: What to add to; `os.environ` if None.
    """
    environment = os.environ if environment is None else environment
    variable, flags = {"tpu": ("LIBTPU_INIT_ARGS", TPU_FLAGS), "gpu": ("XLA_FLAGS", GPU_FLAGS)}.get(
        platform, ("", {})
    )
    given = environment.get(variable, "")
    known = {word.lstrip("-").split("=")[0] for word in given.split()}
    missing = [f"--{name}={value}" for name, value in flags.items() if name not in known]
    if missing:
        environment[variable] = " ".join([given, *missing]).strip()


def guess_platform(environment: Mapping[str, str] | None = None) -> str:
    """The platform that JAX will start, as far as it can be told without starting it.

    What JAX_PLATFORMS names first; else what is installed here and has a device.
    """
    environment = os.environ if environment is None else environment
    asked = environment.get("JAX_PLATFORMS", "").split(",")[0]
    if asked:
        return {"cuda": "gpu"}.get(asked, asked)
    if pathlib.Path("/dev/accel0").exists() or pathlib.Path("/dev/vfio/0").exists():
        return "tpu"
    return "gpu" if pathlib.Path("/dev/nvidiactl").exists() else "cpu"

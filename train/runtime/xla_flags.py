"""XLA flags that overlap communication with computation, each with its reason.

XLA reads them once, when a backend starts: `XLA_FLAGS` by every backend, `LIBTPU_INIT_ARGS` by the
TPU runtime alone. Both abort the process over an unknown flag, so this file lists only flags that
all supported versions have. Flags that the user has set are left as they are.
"""

import os
import pathlib
from collections.abc import Mapping, MutableMapping

TPU_FLAGS: Mapping[str, str] = {
    # All-gathers of fsdp weights run during the matmuls of the previous layer.
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    # An all-gather may span several matmuls, if one is too short to hide it.
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    # Schedule compute cores and interconnect together, so that neither waits for the other.
    "xla_tpu_overlap_compute_collective_tc": "true",
    # The backward pass continues while gradients are summed over `data`.
    "xla_enable_async_all_reduce": "true",
    # Ring attention sends keys and values while it computes with the previous ones.
    "xla_enable_async_collective_permute": "true",
}
"""Flags for LIBTPU_INIT_ARGS."""

GPU_FLAGS: Mapping[str, str] = {
    # Schedule collectives beside matmuls, by an estimate of the duration of each.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # In a scan over layers, gather the weights of the next layer during this one, and reduce this
    # layer's gradients during the next one.
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    # Two iterations of a loop have buffers of their own: one is filled while the other is read.
    "xla_gpu_enable_while_loop_double_buffering": "true",
}
"""Flags for XLA_FLAGS."""

DETERMINISM_FLAGS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def set_overlap_flags(platform: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Add the flags of a platform to the environment. Call it before the backend starts."""
    environment = os.environ if environment is None else environment
    variable, flags = {"tpu": ("LIBTPU_INIT_ARGS", TPU_FLAGS), "gpu": ("XLA_FLAGS", GPU_FLAGS)}.get(
        platform, ("", {})
    )
    user_flags = environment.get(variable, "")
    set_by_user = {flag.lstrip("-").split("=")[0] for flag in user_flags.split()}
    missing = [f"--{name}={value}" for name, value in flags.items() if name not in set_by_user]
    if missing:
        environment[variable] = " ".join([user_flags, *missing]).strip()


def requested_determinism(environment: Mapping[str, str] | None = None) -> str:
    """Return the flag in XLA_FLAGS that asks for operations of fixed order on a GPU, or ""."""
    environment = os.environ if environment is None else environment
    values = {}
    for flag in environment.get("XLA_FLAGS", "").split():
        name, _, value = flag.lstrip("-").partition("=")
        values[name] = value.lower() not in ("false", "0")
    return next((f"--{name}" for name in DETERMINISM_FLAGS if values.get(name)), "")


def guess_platform(environment: Mapping[str, str] | None = None) -> str:
    """Return the platform that JAX will probably start, without starting it.

    The first entry of JAX_PLATFORMS; without it, an accelerator with a device file on this machine.
    """
    environment = os.environ if environment is None else environment
    requested = environment.get("JAX_PLATFORMS", "").split(",")[0]
    if requested:
        return {"cuda": "gpu"}.get(requested, requested)
    if pathlib.Path("/dev/accel0").exists() or pathlib.Path("/dev/vfio/0").exists():
        return "tpu"
    return "gpu" if pathlib.Path("/dev/nvidiactl").exists() else "cpu"

"""Connect the processes of a multi-host run.

Every process runs the same command. They connect to the coordinator at `JAX_COORDINATOR_ADDRESS`
(with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), or to the one that JAX detects itself: under
SLURM's srun, Open MPI, Kubernetes, and on Cloud TPUs.

A collective operation that waits for a lost process may wait forever. JAX's own heartbeats notice
the loss, and JAX then ends all processes.
"""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import NoReturn

import jax
import orbax.checkpoint as ocp

from train.errors import UserError, short_reason

CONNECT_TIMEOUT_SECONDS = 300
"""Seconds to wait for all processes to connect."""

HEARTBEAT_TIMEOUT_SECONDS = 60
"""Seconds without a heartbeat after which JAX takes a process for lost, and ends the others."""


@dataclasses.dataclass(frozen=True)
class Coordinator:
    """Process 0, to which the others connect."""

    address: str | None
    """Host and port; None: JAX detects the address, the count and the index."""
    process_count: int | None = None
    process_index: int | None = None


def find_coordinator(environment: Mapping[str, str]) -> Coordinator | None:
    """Return the coordinator that the environment names; None for a run of one process.

    Raises:
      UserError: A variable is missing or invalid.
    """
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        count = _read_number(environment, "JAX_NUM_PROCESSES")
        index = _read_number(environment, "JAX_PROCESS_ID")
        if not 0 <= index < count:
            raise UserError(f"JAX_PROCESS_ID {index}: give one from 0 to {count - 1}")
        return Coordinator(address, count, index) if count > 1 else None
    # Each of these says that there are several processes, and costs no look beyond this machine.
    # JAX detects the rest in these environments. It is not asked on other machines: its detection
    # may block for a long time, or connect to a metadata server.
    several = (
        _read_size(environment, "SLURM_STEP_NUM_TASKS") > 1
        or _read_size(environment, "OMPI_COMM_WORLD_SIZE") > 1
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
        or _is_tpu_vm(environment)
    )
    return Coordinator(None) if several else None


def initialize_distributed(environment: Mapping[str, str] = os.environ) -> None:
    """Connect to the other processes of the run, if there are any.

    Call it before JAX looks for devices.

    Raises:
      UserError: JAX does not find the other processes, or not all of them have connected within
        `CONNECT_TIMEOUT_SECONDS`.
    """
    # Several runs in one process (a notebook, the tests) connect once.
    coordinator = find_coordinator(environment)
    if coordinator is None or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator.address,
            coordinator.process_count,
            coordinator.process_index,
            local_device_ids(environment),
            initialization_timeout=CONNECT_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"hosts: could not connect to each other ({short_reason(error)}); start the same "
            "command on every host, with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID if need be"
        ) from error


def local_device_ids(environment: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs that this process uses; empty: all that it sees; None: JAX decides.

    Under srun and Open MPI, JAX takes one GPU for each process, the one of its index on the node.
    That is right for one task a GPU where each task sees all GPUs of its node. A single task on a
    node uses all of them, and a task that its launcher has bound to GPUs uses those.
    """
    several_tasks_on_node = (
        _read_size(environment, "SLURM_STEP_NUM_TASKS")
        > max(_read_size(environment, "SLURM_STEP_NUM_NODES"), 1)
        or _read_size(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") > 1
    )
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    num_visible = len(visible.split(",")) if visible else None
    is_bound = num_visible is not None and (
        num_visible == 1 or num_visible < _read_size(environment, "SLURM_GPUS_ON_NODE")
    )
    given = "JAX_LOCAL_DEVICE_IDS" in environment
    return None if given or (several_tasks_on_node and not is_bound) else []


def barrier(name: str, timeout_seconds: float = 1200) -> None:
    """Wait until all processes of the run have called this with the same name.

    The barrier uses no devices, so any thread may call it.
    """
    if jax.process_count() > 1:
        # `multihost_utils.sync_global_devices` runs a collective, which another thread's programs
        # could meet in another order on another host. Orbax's barrier asks the key-value store.
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(timeout_seconds * 1000))


def exit_process(status: int) -> NoReturn:
    """End the process. One that failed does not wait for the others, which may wait for it."""
    # In order (status 0) processes leave together, through JAX's own atexit handler.
    if status and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{name} {text or '(not set)'}: give a number, as JAX_COORDINATOR_ADDRESS is set"
        )
    return int(text)


def _read_size(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    # Other programs set these variables: a value that is not a number counts as missing.
    return int(text) if text.isdecimal() else 0


def _is_tpu_vm(environment: Mapping[str, str]) -> bool:
    """Return True on a machine with a TPU that JAX is to use."""
    platforms = environment.get("JAX_PLATFORMS", "tpu").split(",")
    devices = pathlib.Path("/dev")
    return (
        "tpu" in platforms
        and importlib.util.find_spec("libtpu") is not None
        and any(devices.glob("accel[0-9]*"))
    )

"""Connect the processes of a multi-host run, and end all of them when one has gone.

Every process runs the same command. They connect to the coordinator at `JAX_COORDINATOR_ADDRESS`
(with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), or to the one that JAX detects itself: under
SLURM's srun, Open MPI, Kubernetes, and on Cloud TPUs.

A collective operation that waits for a lost process may wait forever, and JAX has no public way to
interrupt it. So every process has a heartbeat thread (`train.parallel.heartbeats`), which ends its
process when another one has gone.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import jax

from train.errors import UserError
from train.parallel.heartbeats import Heartbeats

CONNECT_TIMEOUT_SECONDS = 300
"""Seconds to wait for all processes to connect."""

HEARTBEAT_TIMEOUT_SECONDS = 60
"""Seconds without a heartbeat after which a process counts as lost."""

EXIT_TIMEOUT_SECONDS = 10
"""Seconds that an ending process spends on informing the others."""

RESTART_REMEDY = "start all of them again: the run resumes from its newest checkpoint"

LOST_PEER_MARKERS = (
    "gloo",
    "nccl",
    "connection reset",
    "connection closed",
    "unavailable",
    "heartbeat",
    "barrier",
)
"""Lower-case parts of the errors that collectives raise when another process has gone."""

KILLED_MESSAGE = (
    "error: hosts: this process was killed, or aborted because another one has gone; "
    + RESTART_REMEDY
)

SHELL_SCRIPT = 'read said || echo "$0" >&2'
"""Print the first argument, unless a line arrives on standard input before it is closed."""

# One process takes part in one run, and `exit_process` must find both from any thread.
_heartbeats: Heartbeats | None = None
_exit_message: "ExitMessage | None" = None


class ExitMessage:
    """Line on standard error that is printed if this process ends without cancelling it.

    JAX aborts a process whose process 0 has gone, at once, from a C++ thread; so does gloo if a
    peer is lost within a message. No Python code runs then: no `finally`, no `atexit`, no signal
    handler. JAX's `missed_heartbeat_callback` is not an alternative, because its argument has no
    Python type and the call fails. So a child process waits for the end of a pipe, which the
    operating system closes however this process ends. It is a shell, which starts at once and
    needs little memory.
    """

    def __init__(self, line: str):
        """Start the shell that holds the line."""
        # `cancel` is called by the thread of the heartbeats and by the main thread.
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", SHELL_SCRIPT, line], stdin=subprocess.PIPE
        )

    def cancel(self) -> None:
        """Discard the line: this process ends by itself, and prints its own error."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None:
            return
        try:
            # A line, and not only the end of the pipe, which a killed process leaves too.
            os.write(shell.stdin.fileno(), b"said\n")
            shell.stdin.close()
            shell.wait(timeout=1)
        except (OSError, subprocess.TimeoutExpired):
            # Ctrl-C in a terminal reaches the shell too. Dead, it prints nothing: as wanted.
            return


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
            # JAX's own heartbeats abort a process without an error message. They are slower than
            # ours, so that they act only if ours fail.
            heartbeat_timeout_seconds=2 * HEARTBEAT_TIMEOUT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, ValueError):
            lacks_package = (
                "KUBERNETES_SERVICE_HOST" in environment
                and importlib.util.find_spec("kubernetes") is None
            )
            other_way = ", or on Kubernetes install the package kubernetes" if lacks_package else ""
            raise UserError(
                f"hosts: JAX cannot find the other hosts ({reason}); set JAX_COORDINATOR_ADDRESS, "
                f"JAX_NUM_PROCESSES and JAX_PROCESS_ID on each{other_way}"
            ) from error
        raise UserError(
            f"hosts: not all of them connected within {CONNECT_TIMEOUT_SECONDS} s ({reason}); "
            "start the same command on every host, with JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID if need be"
        ) from error
    # After the connection only: its store carries the heartbeats.
    _start_heartbeats()


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


def _start_heartbeats() -> None:
    """Start this process's heartbeats, and end it when another process has gone."""
    # JAX has no public name for the key-value store of its coordinator, and a store of our own
    # would need a port of its own. `jax.process_index` is not asked: it would look for devices.
    from jax._src import distributed

    global _heartbeats, _exit_message
    state = distributed.global_state
    assert state.client is not None  # `jax.distributed.initialize` has returned
    _heartbeats = Heartbeats(
        state.client, state.process_id, _on_lost_peer, timeout=HEARTBEAT_TIMEOUT_SECONDS
    )
    _heartbeats.start()
    atexit.register(_heartbeats.stop)
    # JAX aborts the others when process 0 has gone, and gloo any process whose connection to a lost
    # peer broke within a message.
    _exit_message = ExitMessage(KILLED_MESSAGE)
    atexit.register(_exit_message.cancel)
    # Python runs atexit handlers after an uncaught exception, and JAX's waits there for the other
    # processes, which wait for this one. Errors that the command line knows never come here; a
    # hook also serves users who call `train.fit` from a script of their own.
    sys.excepthook = functools.partial(_exit_on_uncaught, sys.excepthook)


def _on_lost_peer(description: str) -> NoReturn:
    """End this process. The heartbeat thread does it, as the main thread may be blocked."""
    print(f"error: hosts: {description}; {RESTART_REMEDY}", file=sys.stderr)
    exit_process(1)


def _exit_on_uncaught(
    previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> NoReturn:
    """Print the traceback of an uncaught exception, and end all processes."""
    # The traceback first: ending takes seconds, in which a supervisor may kill this process.
    previous(kind, error, trace)
    exit_process(1, f"{kind.__name__}: {error}")


@contextlib.contextmanager
def explain_lost_peers() -> Iterator[None]:
    """Raise a UserError in place of the errors of collectives whose peer has gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, UserError) as error:
        if not is_lost_peer_error(error):
            raise
        # Errors of gloo and gRPC have several lines of addresses and source files.
        text = " ".join(str(error).split())
        raise UserError(
            f"hosts: another process of the run has ended ({text[:160]}); {RESTART_REMEDY}"
        ) from error


def barrier(name: str, timeout_seconds: float = 1200) -> None:
    """Wait until all processes of the run have called this with the same name.

    The barrier uses no devices, so any thread may call it.
    """
    if jax.process_count() > 1:
        # `multihost_utils.sync_global_devices` runs a collective, which another thread's programs
        # could meet in another order on another host. Orbax's barrier asks the key-value store.
        import orbax.checkpoint as ocp

        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(timeout_seconds * 1000))


def is_lost_peer_error(error: BaseException) -> bool:
    """Return True if an error says that another process of the run has gone."""
    # JAX has one type for all errors of the runtime, and the transports (gloo, NCCL, gRPC) word
    # them differently, so the text decides.
    known = isinstance(error, jax.errors.JaxRuntimeError | UserError)
    text = str(error).lower()
    return known and jax.process_count() > 1 and any(part in text for part in LOST_PEER_MARKERS)


def exit_process(status: int, reason: str = "") -> NoReturn:
    """End a failed process, without waiting for processes that wait for it.

    Args:
      status: Exit status.
      reason: Reported to the other processes, which then end too. Without it, they only
        learn to expect no more heartbeats.
    """
    # In order (status 0) processes leave together, through JAX's own atexit handler.
    if status and "jax" in sys.modules and jax.distributed.is_initialized():
        # `os._exit` below flushes nothing.
        sys.stdout.flush()
        sys.stderr.flush()
        if _heartbeats is not None:
            goodbye = (
                functools.partial(_heartbeats.announce_exit, reason) if reason else _heartbeats.stop
            )
            # On a thread: if process 0 has gone, writing to its store takes minutes to fail.
            thread = threading.Thread(target=goodbye, daemon=True)
            thread.start()
            thread.join(EXIT_TIMEOUT_SECONDS)
        if _exit_message is not None:
            _exit_message.cancel()
        os._exit(status)  # no atexit handlers: JAX's would wait for the other processes
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

"""What is said of a process that can no longer say it.

Several processes that train one model together: meeting, and parting when one of them has gone.

Each process runs the same command. They meet where `JAX_COORDINATOR_ADDRESS` says (with
`JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), or where JAX finds out by itself: under SLURM's srun,
Open MPI, Kubernetes, and on Cloud TPUs.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax

from train.errors import UserError
from train.parallel.heartbeats import Heartbeats

SHELL_SCRIPT = 'read said || echo "$0" >&2'


class ExitMessage:
    """A line on standard error, if this process ends without having taken it back.

    A shell holds it, and the other end of a pipe: that closes however this process ends. JAX aborts
    one whose process 0 has gone, at once and from a thread of its own (its
    ``missed_heartbeat_callback`` would be asked, but cannot be called: it is given a status that
    has no form in Python).
    """

    def __init__(self, line: str):
        """Leaves the line with the shell."""
        self._lock = threading.Lock()
        self._shell: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", SHELL_SCRIPT, line], stdin=subprocess.PIPE
        )

    def cancel(self) -> None:
        """This process ends by its own will, and has said what there was to say."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None:
            return
        try:
            os.write(shell.stdin.fileno(), b"said\n")
            shell.stdin.close()
            shell.wait(timeout=1)
        except (OSError, subprocess.TimeoutExpired):
            return  # it has been ended itself


CONNECT_TIMEOUT_SECONDS = 300
"""Seconds that the others are waited for."""


HEARTBEAT_TIMEOUT_SECONDS = 60
"""Seconds without a word after which a process counts as gone, and ends the others."""


EXIT_TIMEOUT_SECONDS = 10
"""Seconds that a process that ends has for telling the others."""


RESTART_REMEDY = "start all of them again: the run goes on from its newest checkpoint"


LOST_PEER_MARKERS = (
    "gloo",
    "nccl",
    "connection reset",
    "connection closed",
    "unavailable",
    "heartbeat",
    "barrier",
)
"""What errors say when a process that takes part in something is no longer there."""


KILLED_MESSAGE = (
    "error: hosts: this process was killed, or ended by JAX because the first one has gone; "
    + RESTART_REMEDY
)


_heartbeats: Heartbeats | None = None


_last_words: ExitMessage | None = None


@dataclasses.dataclass(frozen=True)
class Coordinator:
    """Where processes meet."""

    address: str | None
    """Host and port of the first; None: JAX finds it out, and the rest."""
    process_count: int | None = None
    process_index: int | None = None


def find_coordinator(environment: Mapping[str, str]) -> Coordinator | None:
    """Where this process meets others; None if it is alone.

    Raises UserError if what is given for it is not all there, or makes no sense.
    """
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        count = _number(environment, "JAX_NUM_PROCESSES")
        index = _number(environment, "JAX_PROCESS_ID")
        if not 0 <= index < count:
            raise UserError(f"JAX_PROCESS_ID {index}: give one from 0 to {count - 1}")
        return Coordinator(address, count, index) if count > 1 else None
    several = (
        _size(environment, "SLURM_STEP_NUM_TASKS") > 1
        or _size(environment, "OMPI_COMM_WORLD_SIZE") > 1
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
        or _on_a_tpu_vm(environment)
    )
    return Coordinator(None) if several else None


def initialize_distributed(environment: Mapping[str, str] = os.environ) -> None:
    """Meets the other processes of the run, if there are any; before JAX looks for devices.

    Raises UserError if they do not all come within `WAIT` seconds.
    """
    where = find_coordinator(environment)
    if where is None or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            where.address,
            where.process_count,
            where.process_index,
            initialization_timeout=CONNECT_TIMEOUT_SECONDS,
            # JAX ends the others too, by aborting them: should ours be silent for once.
            heartbeat_timeout_seconds=2 * HEARTBEAT_TIMEOUT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"hosts: did not all meet within {CONNECT_TIMEOUT_SECONDS} s ({why}); start the same command on every "
            "host, with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID if need be"
        ) from error
    _listen()


def _listen() -> None:
    """Has this process give signs of life, and end when another has ended."""
    from jax._src import distributed  # the store has no public name

    global _heartbeats, _last_words
    state = distributed.global_state  # to ask jax.process_index() would look for devices
    assert state.client is not None  # it was made just now
    _heartbeats = Heartbeats(
        state.client, state.process_id, _end, timeout=HEARTBEAT_TIMEOUT_SECONDS
    )
    _heartbeats.start()
    atexit.register(_heartbeats.stop)
    if state.process_id:
        _last_words = ExitMessage(KILLED_MESSAGE)
        atexit.register(_last_words.cancel)
    sys.excepthook = _unforeseen


def _end(what: str) -> NoReturn:
    """The main thread may wait for what will not come: it is not asked."""
    print(f"error: hosts: {what}; {RESTART_REMEDY}", file=sys.stderr)
    exit_process(1)


def _unforeseen(kind: type[BaseException], error: BaseException, trace: Any) -> NoReturn:
    """An error of ours shows where it comes from, and ends the others as any other does."""
    sys.__excepthook__(kind, error, trace)
    exit_process(1, f"{kind.__name__}: {error}")


@contextlib.contextmanager
def explain_lost_peers() -> Iterator[None]:
    """Around what processes do together: one that has gone is told of in one line."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, UserError) as error:
        if not is_lost_peer_error(error):
            raise
        text = " ".join(str(error).split())
        raise UserError(
            f"hosts: another process of the run has gone ({text[:160]}); {RESTART_REMEDY}"
        ) from error


def barrier(name: str, timeout_seconds: float = 1200) -> None:
    """Wait until all processes of the run have called this with the same `name`."""
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp

        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(timeout_seconds * 1000))


def is_lost_peer_error(error: BaseException) -> bool:
    """Whether an error is that of a process whose partner is no longer there."""
    known = isinstance(error, jax.errors.JaxRuntimeError | UserError)
    text = str(error).lower()
    return known and jax.process_count() > 1 and any(word in text for word in LOST_PEER_MARKERS)


def exit_process(status: int, reason: str = "") -> NoReturn:
    """Ends a process that has failed, without waiting for those that wait for it.

    Args:
      status: Its exit status.
      why: What the others are told; without it, nothing.
    """
    if status and "jax" in sys.modules and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        if _heartbeats is not None:
            part = (
                functools.partial(_heartbeats.announce_exit, reason) if reason else _heartbeats.stop
            )
            parting = threading.Thread(target=part, daemon=True)
            parting.start()
            parting.join(
                EXIT_TIMEOUT_SECONDS
            )  # where there is nobody to answer, this takes minutes
        if _last_words is not None:
            _last_words.cancel()
        os._exit(status)
    sys.exit(status)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{name} {text or '(not set)'}: give a number, as JAX_COORDINATOR_ADDRESS is set"
        )
    return int(text)


def _size(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def _on_a_tpu_vm(environment: Mapping[str, str]) -> bool:
    """Whether this is a machine with a TPU that JAX is to use."""
    platforms = environment.get("JAX_PLATFORMS", "tpu").split(",")
    devices = pathlib.Path("/dev")
    return (
        "tpu" in platforms
        and importlib.util.find_spec("libtpu") is not None
        and any(devices.glob("accel[0-9]*"))
    )

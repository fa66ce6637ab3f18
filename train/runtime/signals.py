"""Handle signals: stop a run with a checkpoint.

While a run trains, a stop signal asks it to finish its step, save a checkpoint and end
(`StopRequest`). Before and after training there is nothing to save (`exit_on_stop_signal`).
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from train.errors import NoTracebackError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that schedulers and people send to stop a run. SLURM sends USR1 in advance on
request (`--signal=USR1@60`); SIGHUP comes when the terminal is closed."""

INTERRUPTED_EXIT_STATUS = 130
"""Exit status after Ctrl-C with nothing to save, as of a shell."""

PREEMPTED_EXIT_STATUS = 75
"""Exit status of a run that was stopped and lost nothing (EX_TEMPFAIL): it can be requeued."""

REPEAT_SECONDS = 5.0
"""Seconds in which another SIGTERM or SIGUSR1 is taken for the same request."""

# JAX compares these counts between processes. A process makes one request for each step it
# makes, so the counts of all processes agree, also after a rollback to an earlier step.
_request_numbers = itertools.count(1)


class PreemptedError(NoTracebackError):
    """The run was stopped by a signal and has saved a checkpoint. The exit status is 75."""


class StopRequest:
    """Context manager in which `STOP_SIGNALS` ask the run to stop; a second one ends the process.

    With several processes, JAX passes the signal of one to all, and all stop after the same step.
    JAX handles SIGTERM itself, so the other signals are turned into a SIGTERM.
    """

    def __init__(self, *, trains: bool = True) -> None:
        """Prepare the request. A process that trains nothing does not start JAX for it."""
        self._trains = trains
        self._signal_name: str | None = None
        self._repeats_until = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._is_distributed = False

    def __enter__(self) -> Self:
        import jax  # `configs` and `completion` import this module, and need no JAX

        self._is_distributed = self._trains and jax.process_count() > 1
        for number in STOP_SIGNALS:
            if self._is_distributed and number == signal.SIGTERM:
                continue
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            try:
                self._previous_handlers[number] = signal.signal(number, self._handle)
            except ValueError:  # only the main thread may set handlers
                return self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def requested_by(self) -> str | None:
        """Return the signal that asked the run to stop after this step; None if there is none.

        Every process calls this after every step. JAX stops all processes at the count after the
        largest that any of them has reached, and only there. The count therefore belongs to the
        process, not to the run: with the step of a resumed run as the count, a signal that comes
        before the first step would name a count that is never reached.
        """
        if not self._is_distributed:
            return self._signal_name
        from jax.experimental import multihost_utils

        reached = multihost_utils.reached_preemption_sync_point(next(_request_numbers))
        return (self._signal_name or signal.SIGTERM.name) if reached else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal_name is not None:
            # The kernel and the shell each send a SIGHUP when a terminal is closed. A scheduler
            # signals every process, and the queue of a sweep passes the signal on to its workers.
            is_repeated = number != signal.SIGINT and time.monotonic() < self._repeats_until
            if number == signal.SIGHUP or is_repeated:
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._signal_name = signal.Signals(number).name
        self._repeats_until = time.monotonic() + REPEAT_SECONDS
        if self._is_distributed:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def exit_on_stop_signal() -> Iterator[None]:
    """Inside, end the process with a line on standard error at one of `STOP_SIGNALS`.

    It covers the time before `StopRequest` is entered and after it is left. There is nothing to
    save: a new run has made no step, and a resumed one has its checkpoints. The exit status is
    that of a preemption, so that a scheduler starts the job again; after Ctrl-C it is 130.
    """

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        # Not by an exception: Python drops one that is raised in a callback of the garbage
        # collector, and C++ code may drop it too, while a run starts and JAX traces. Nor by
        # `print`, which the handler may interrupt.
        name = signal.Signals(number).name
        line = "interrupted\n"
        if number != signal.SIGINT:
            line = (
                f"stopped by {name} while not training: nothing new to save; the same command "
                "starts again from the newest checkpoint\n"
            )
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(INTERRUPTED_EXIT_STATUS if number == signal.SIGINT else PREEMPTED_EXIT_STATUS)

    previous_handlers: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        # Handlers of other libraries, and ignored signals, stay as they are.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            try:
                previous_handlers[number] = signal.signal(number, handle)
            except ValueError:
                break  # only the main thread may set handlers
    try:
        yield
    finally:
        for changed, handler in previous_handlers.items():
            signal.signal(changed, handler)

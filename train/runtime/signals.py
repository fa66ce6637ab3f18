"""Handle signals: stop a run with a checkpoint, and deliver Ctrl-C reliably.

While a run trains, a stop signal asks it to finish its step, save a checkpoint and end
(`StopRequest`). Before and after training there is nothing to save (`exit_on_stop_signal`).
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from train.errors import NoTracebackError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that schedulers and people send to stop a run. SLURM sends USR1 in advance on
request (`--signal=USR1@60`); SIGHUP comes when the terminal is closed."""

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that end a process silently by default. SIGINT raises KeyboardInterrupt."""

PREEMPTED_EXIT_STATUS = 75
"""Exit status of a run that was stopped and lost nothing (EX_TEMPFAIL): it can be requeued."""

REPEAT_SECONDS = 5.0
"""Seconds in which another SIGTERM or SIGUSR1 is taken for the same request."""

RETRY_SECONDS = 0.5
"""Seconds after which a lost KeyboardInterrupt is raised again."""

CLEANUP_SECONDS = 10.0
"""Seconds that an interrupted program has for cleaning up before it is interrupted again."""

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
        import jax  # the command line imports this module before it needs JAX

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
    """Inside, end the process with a line on standard error at one of `EXIT_SIGNALS`.

    It covers the time before `StopRequest` is entered and after it is left. There is nothing to
    save: a new run has made no step, and a resumed one has its checkpoints. The exit status is
    that of a preemption, so that a scheduler starts the job again.
    """

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        line = (
            f"stopped by {name} while not training: nothing new to save; the same command starts "
            "again from the newest checkpoint\n"
        )
        # Not by `print`, which is not reentrant: the handler may interrupt a `print`.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(PREEMPTED_EXIT_STATUS)

    previous_handlers = {}
    for number in EXIT_SIGNALS:
        # Handlers of other libraries, and ignored signals, stay as they are.
        if signal.getsignal(number) is signal.SIG_DFL:
            try:
                previous_handlers[number] = signal.signal(number, handle)
            except ValueError:
                break  # only the main thread may set handlers
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def reliable_keyboard_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C always raises KeyboardInterrupt.

    Python raises it wherever the main thread happens to be. In callbacks of the garbage collector
    and of weak references, Python prints and ignores it; C++ code may drop it or turn it into
    another error. While a run starts and JAX traces, 11 of 40 interrupts were lost that way. No
    hook covers these places, so a thread repeats the signal until the exception has arrived. It
    waits while the program cleans up after a KeyboardInterrupt.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the shell ignores it, or another library handles it
        return
    requested, finished = threading.Event(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        requested.set()
        raise KeyboardInterrupt

    previous_hook = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        # The lost interrupt is repeated, so that Python's message about it would be wrong.
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous_hook(unraisable)

    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # only the main thread may set handlers, and only there it is raised
        yield
        return
    sys.unraisablehook = hook
    # Started now and not when the signal comes: the handler may interrupt the start of a thread.
    repeater = threading.Thread(
        target=_repeat_interrupt, args=(interrupt, requested, finished), daemon=True
    )
    repeater.start()
    try:
        yield
    except Exception as error:
        if requested.is_set():  # C++ code has turned the interrupt into this error
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # one may still be on its way
        finished.set()
        requested.set()
        repeater.join()
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _repeat_interrupt(
    handler: object, requested: threading.Event, finished: threading.Event
) -> None:
    """Once requested, interrupt the main thread until it ends, but not while it cleans up."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # it runs
    requested.wait()
    cleanup_seconds = CLEANUP_SECONDS
    while not finished.wait(RETRY_SECONDS):
        cleanup_seconds -= RETRY_SECONDS
        if signal.getsignal(signal.SIGINT) is not handler:
            # `StopRequest` has been entered since: one signal asks the run to stop.
            signal.pthread_kill(main_thread, signal.SIGINT)
            return
        if not _handles_interrupt(main_thread) or cleanup_seconds < 0:
            signal.pthread_kill(main_thread, signal.SIGINT)
            cleanup_seconds = CLEANUP_SECONDS


def _handles_interrupt(thread: int) -> bool:
    """Return True while a thread handles a KeyboardInterrupt, in `finally` blocks for example."""
    current: Any = sys._current_exceptions().get(thread)
    current = current[1] if isinstance(current, tuple) else current  # a tuple until Python 3.11
    return isinstance(current, KeyboardInterrupt)

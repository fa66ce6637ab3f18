"""Being asked to stop: the step under way is finished, a checkpoint saved, and the run ends.

Ctrl-C, which must not get lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from train.errors import NoTracebackError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers and people stop a run with. SLURM warns with USR1 if asked (--signal=USR1@60);
SIGHUP comes when the terminal is closed."""


EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Those that would end a process without a word while it does not train; SIGINT raises an error."""


PREEMPTED_EXIT_STATUS = 75
"""Exit status of a process that was told to stop and lost nothing (EX_TEMPFAIL): try again."""


_asked = itertools.count(1)
"""How often this process has asked whether to stop: all processes have, as often, at each step."""


class PreemptedError(NoTracebackError):
    """The run was told to stop; its checkpoint is saved. The command line exits with 75."""


class StopRequest:
    """While entered, `SIGNALS` ask the run to stop; a second one ends the process at once.

    Where several processes train together, JAX passes the notice of one to all, and they stop after
    the same step. It hears SIGTERM itself; the other signals are made into one.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}
        self._together = False

    def __enter__(self) -> Self:
        import jax  # whoever asks what a verb does need not wait for it

        self._together = jax.process_count() > 1
        for number in STOP_SIGNALS:
            if self._together and number == signal.SIGTERM:
                continue
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # by nohup
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # only the main thread may; elsewhere signals are left alone
                return self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested_by(self) -> str | None:
        """By what the run was asked to stop after this step; every step has to ask.

        JAX has all processes stop at the count after the largest that any has come to, and only
        there. So they do not count from the step that a run goes on from: a notice that comes
        before the first would name a count that is never reached.
        """
        if not self._together:
            return self.signal
        from jax.experimental import multihost_utils

        reached = multihost_utils.reached_preemption_sync_point(next(_asked))
        return (self.signal or signal.SIGTERM.name) if reached else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:
                return  # the kernel and the shell each send one when a terminal is closed
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number).name
        if self._together:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def exit_on_stop_signal() -> Iterator[None]:
    """End the process with a line on standard error if it is told to stop while not training.

    Until `StopRequest` takes over, and after it has let go, there is nothing to save: a run that
    begins has written no step, and one that resumes has its checkpoints. The exit status is that of
    a preemption, so that a scheduler starts the job again.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        line = (
            f"stopped by {name} while not training: nothing new to save; the same command starts "
            "again from the newest checkpoint\n"
        )
        # Not by print: it may be what this handler interrupts.
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(PREEMPTED_EXIT_STATUS)

    before = {}
    for number in EXIT_SIGNALS:
        # A handler of somebody else's, and a signal that is ignored, stay as they are.
        if signal.getsignal(number) is signal.SIG_DFL:
            try:
                before[number] = signal.signal(number, stop)
            except ValueError:
                break  # only the main thread may
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


RETRY_SECONDS = 0.5
"""Seconds after which an interruption that got lost comes again."""


CLEANUP_SECONDS = 10.0
"""Seconds that what is interrupted has for cleaning up, before that is interrupted too."""


@contextlib.contextmanager
def reliable_keyboard_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends what runs, as a KeyboardInterrupt.

    Python raises that wherever the main thread is. While a run starts and JAX traces, 11 of 40 got
    lost: in callbacks of the garbage collector and of weak references, where Python tells that it
    ignores it and goes on, and in C++ that drops errors or turns them into others.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the shell has it ignored, or somebody else takes care
        return
    asked, over = threading.Event(), threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        asked.set()
        raise KeyboardInterrupt

    tell = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            tell(unraisable)

    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # only the main thread may, and only there it is raised
        yield
        return
    sys.unraisablehook = hook
    # Begun now: the main thread may be anywhere when it is interrupted, in a thread's start too.
    nagging = threading.Thread(target=_nag, args=(interrupt, asked, over), daemon=True)
    nagging.start()
    try:
        yield
    except Exception as error:
        if asked.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # one may be on its way
        over.set()
        asked.set()
        nagging.join()
        sys.unraisablehook = tell
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _nag(handler: object, asked: threading.Event, over: threading.Event) -> None:
    """Once asked, interrupts the main thread until it ends, but not while it cleans up."""
    main = threading.main_thread().ident
    assert main is not None  # it runs
    asked.wait()
    patience = CLEANUP_SECONDS
    while not over.wait(RETRY_SECONDS):
        patience -= RETRY_SECONDS
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.pthread_kill(main, signal.SIGINT)  # a run by now, which is to be asked once
            return
        if not _cleans(main) or patience < 0:
            signal.pthread_kill(main, signal.SIGINT)
            patience = CLEANUP_SECONDS


def _cleans(thread: int) -> bool:
    """Whether a thread is about what follows on a KeyboardInterrupt."""
    found: Any = sys._current_exceptions().get(thread)
    found = found[1] if isinstance(found, tuple) else found  # so it is up to Python 3.11
    return isinstance(found, KeyboardInterrupt)

"""Ctrl-C, which must not get lost."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

AGAIN = 0.5
"""Seconds after which an interruption that got lost comes again."""

CLEANING = 10.0
"""Seconds that what is interrupted has for cleaning up, before that is interrupted too."""


@contextlib.contextmanager
def heeded() -> Iterator[None]:
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
    patience = CLEANING
    while not over.wait(AGAIN):
        patience -= AGAIN
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.pthread_kill(main, signal.SIGINT)  # a run by now, which is to be asked once
            return
        if not _cleans(main) or patience < 0:
            signal.pthread_kill(main, signal.SIGINT)
            patience = CLEANING


def _cleans(thread: int) -> bool:
    """Whether a thread is about what follows on a KeyboardInterrupt."""
    found: Any = sys._current_exceptions().get(thread)
    found = found[1] if isinstance(found, tuple) else found  # so it is up to Python 3.11
    return isinstance(found, KeyboardInterrupt)

"""Ctrl-C, which must not get lost."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator

AGAIN = 0.05
"""Seconds after which an interruption that nobody has met comes again."""


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Inside, an interruption comes again until it is met.

    Python raises KeyboardInterrupt wherever the main thread is. Where that is a callback of the
    garbage collector or of a weak reference, it tells that it ignores it, and goes on. While JAX
    traces and compiles that is where half of them come.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        again = threading.Timer(AGAIN, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before

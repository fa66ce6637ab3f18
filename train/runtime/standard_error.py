"""Standard error that never ends a run: what cannot be shown is dropped.

The reader of a pipe may leave (`2>&1 | head`), a terminal may be closed, the disk of a log may be
full. None of these is a reason to lose a day of training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class LenientStream:
    """Standard error, or the stream given, without the errors of writing to it.

    Everything else (`isatty`, `fileno`, `encoding`) is that of the stream itself.
    """

    def __init__(self, stream: TextIO | None = None):
        """Wrap a stream; None is whatever `sys.stderr` is at each call."""
        self._given = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, as far as possible. Python would exit with status 120 for an error at its end."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    @property
    def _stream(self) -> Any:
        return self._given or sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_stderr_lenient() -> None:
    """Let nothing that this process writes to standard error raise an error.

    Where a standard stream was closed before the start (`2>&-`), the null device takes its place:
    otherwise the next file to be opened gets its number, a checkpoint's for example, and what C++
    libraries log is written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name, None) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    if not isinstance(sys.stderr, LenientStream):
        sys.stderr = LenientStream(sys.stderr)

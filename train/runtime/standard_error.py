"""Make standard error lenient: output that cannot be written is dropped.

The reader of a pipe may end (`2>&1 | head`), a terminal may be closed, the disk of a log may be
full. None of these is a reason to lose a day of training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO


class LenientStream:
    """Text stream that drops the errors of writing to another stream.

    All other attributes (`fileno`, `encoding`) are those of the wrapped stream.
    """

    def __init__(self, stream: TextIO | None = None):
        """Wrap a stream; None: the `sys.stderr` of the time of each call."""
        self._wrapped = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as far as possible. An error when Python exits would make the exit status 120."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    @property
    def _stream(self) -> Any:
        return self._wrapped or sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_stderr_lenient() -> None:
    """Wrap `sys.stderr`, and open the null device for standard streams that are closed.

    A stream may be closed before the start (`2>&-`). The next file to be opened, a checkpoint for
    example, would get its descriptor, and C++ libraries would write their logs into it.
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

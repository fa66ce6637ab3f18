"""Set-up of a process before it imports JAX: lenient standard error, huge pages."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TextIO


class LenientStream:
    """Text stream that drops the errors of writing to another stream.

    The reader of a pipe may end (`2>&1 | head`), a terminal may be closed, the disk of a log may be
    full. None of these is a reason to lose a day of training.

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
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name, None) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    if not isinstance(sys.stderr, LenientStream):
        sys.stderr = LenientStream(sys.stderr)


TUNABLES_VARIABLE = "GLIBC_TUNABLES"
HUGE_PAGES_TUNABLE = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with huge pages requested, unless it sets them already."""
    tunables = environment.get(TUNABLES_VARIABLE, "")
    if HUGE_PAGES_TUNABLE in tunables:
        return dict(environment)
    joined = f"{tunables}:{HUGE_PAGES_TUNABLE}=1" if tunables else f"{HUGE_PAGES_TUNABLE}=1"
    return {**environment, TUNABLES_VARIABLE: joined}


def restart_with_huge_pages() -> None:
    """Restart this program with huge pages, unless they are set already (Linux).

    XLA's CPU backend allocates the temporaries of a step with malloc and frees them afterwards.
    Blocks of that size are mapped anew each time: a gigabyte in pages of 4 KiB is a quarter of a
    million page faults a step, a quarter of the time of a small model's step. glibc can request
    pages of 2 MiB instead (madvise with MADV_HUGEPAGE), from 2.35 on, but reads this setting, an
    environment variable, only when a process starts. Hence the program replaces itself once
    (`execve`): the process keeps its id, arguments and open files, at the cost of a second start of
    Python.

    Returns if nothing is to be done. The restarted program returns here too: the variable is then
    set. Call it before anything large is imported.
    """
    environment = with_huge_pages(os.environ)
    if sys.platform == "linux" and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


SCRIPT = "linen-transformer"
"""Name of the console script."""


def program_name() -> str:
    """Return the words that start this program, for messages."""
    return SCRIPT if pathlib.Path(sys.argv[0]).stem == SCRIPT else "python -m train"

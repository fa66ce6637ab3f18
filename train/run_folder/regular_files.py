"""Read regular files of bounded size.

A path may name a FIFO, on which `open` blocks forever, a device that never ends, or a sparse file
larger than memory. A run's folder may come from somebody else, so its content is not trusted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from train.errors import UserError

if TYPE_CHECKING:
    from train.data.files import AnyPath

MAX_SETTINGS_BYTES = 2**24
"""Limit of a settings file: config.json, recovery.json, a price table, a config in Python."""

MAX_VOCABULARY_BYTES = 2**28
"""Limit of a tokenizer file or a list of class names: 256 MiB."""

MAX_LOG_BYTES = 2**32
"""Limit of a JSON lines log (metrics, events, times) or of samples: 4 GiB."""

MAX_LINE_BYTES = 2**24
"""Limit of one line of a log."""

_CHUNK_BYTES = 2**22
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO with it does not wait for a writer
BINARY = getattr(os, "O_BINARY", 0)
_FILE_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def is_local(path: AnyPath) -> bool:
    """Return True for a path of this machine's file systems, False for `gs://...` and the like."""
    return "://" not in os.fspath(path)


@contextlib.contextmanager
def open_regular(path: AnyPath) -> Iterator[IO[bytes]]:
    """Open a file for reading.

    Raises:
      UserError: The path is a FIFO, a device, a socket or a folder.
      OSError: The file cannot be opened.
    """
    if not is_local(path):
        with path.open("rb") as stream:  # object stores hold nothing but regular files
            yield cast("IO[bytes]", stream)
        return
    # O_NONBLOCK: opening a FIFO for reading would wait for a writer, before it can be checked.
    descriptor = os.open(path, os.O_RDONLY | NONBLOCK | BINARY)
    with checked_stream(path, descriptor, "rb") as stream:
        yield stream


@contextlib.contextmanager
def checked_stream(
    path: AnyPath, descriptor: int, mode: Literal["rb", "a+b"]
) -> Iterator[IO[bytes]]:
    """Check an open descriptor, not its path, which may be replaced meanwhile; close it after."""
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            name = _FILE_KINDS.get(kind, "something else")
            raise UserError(f"{path}: is {name}, not a regular file; give a file")
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, mode) as stream:
        yield stream


def read_bytes(path: AnyPath, max_bytes: int) -> bytes:
    """Return the content of a file.

    Args:
      path: Local or remote file.
      max_bytes: Size above which the file is refused, before reading where its size is known.

    Raises:
      UserError: It is not a regular file, or too large.
      OSError: It cannot be read.
    """
    with open_regular(path) as stream:
        if (size := _size(path, stream)) > max_bytes:
            raise too_large_error(path, size, max_bytes)
        return read_all(stream, path, max_bytes)


def _size(path: AnyPath, stream: IO[bytes]) -> int:
    if is_local(path):
        return os.fstat(stream.fileno()).st_size
    remote: Any = path
    length: int = remote.stat().length
    return length


def read_all(stream: IO[bytes], path: AnyPath, max_bytes: int) -> bytes:
    """Return the rest of a stream (UserError: it has more than `max_bytes` bytes).

    The stream is read in chunks, as a file may be longer than its size says, or grow meanwhile.
    """
    chunks, size = [], 0
    while chunk := stream.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_bytes:
            raise too_large_error(path, size, max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def iter_lines(stream: IO[bytes], path: AnyPath, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a stream with their ends (UserError: one has more than `max_bytes`)."""
    number = 0
    # With a limit, `readline` never reads a whole file without line ends into memory.
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise UserError(
                f"{path}:{number}: is a line of more than {format_bytes(max_bytes)}; "
                "split it, or restore the original file"
            )
        yield line


def too_large_error(path: AnyPath, size: int, max_bytes: int) -> UserError:
    """Return the error for a file above its limit."""
    return UserError(
        f"{path}: has {format_bytes(size)} or more, and at most {format_bytes(max_bytes)} are read "
        "of such a file; give the right file, or a smaller one"
    )


def format_bytes(size: int) -> str:
    """Return a size with its unit, e.g. `12 bytes`, `16 MiB` or `1.5 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"

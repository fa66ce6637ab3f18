"""Regular files of a bounded size: the only ones that are read, and appended to.

A path may name a FIFO, on which `open` waits for ever, a device that never ends, or a sparse file
that is larger than the memory. A run's folder may be another's, so what is in it is not trusted;
and what a run appends to must lie in its folder, not where a link leads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, cast

from train.errors import UserError
from train.runtime.host_memory import host_memory_bytes

if TYPE_CHECKING:
    from train.data.files import AnyPath

MAX_SETTINGS_BYTES = 2**24
"""Most of a file of settings: config.json, recovery.json, a table of prices, a config in Python."""


MAX_VOCABULARY_BYTES = 2**28
"""Most of a tokenizer's file, or of the names of classes: 256 MiB."""


MAX_MANIFEST_BYTES = 2**26
"""Most of a checkpoint's manifest: half a million files."""


MAX_LOG_BYTES = 2**32
"""Most of a log of JSON lines (metrics, events, times) or of samples: 4 GiB."""


MAX_LINE_BYTES = 2**24
"""Most of one line of a log."""


MAX_DOCUMENT_BYTES = 2**28
"""Most of one line of a dataset in JSON lines: a line is a document."""


_CHUNK = 2**22


_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO with it does not wait for a writer


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


_BINARY = getattr(os, "O_BINARY", 0)


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def is_local(path: AnyPath) -> bool:
    """Return True for a path of this machine's file systems, False for `gs://...` and the like."""
    return "://" not in os.fspath(path)


def max_text_bytes() -> int:
    """Return how large a text may be that is read whole: a quarter of the machine's memory.

    Its bytes, its characters and its tokens are in memory together.
    """
    return (host_memory_bytes() or 2**36) // 4


@contextlib.contextmanager
def open_regular(path: AnyPath) -> Iterator[IO[bytes]]:
    """Open a file for reading.

    Raises:
      UserError: It is a FIFO, a device, a socket or a folder.
      OSError: It cannot be opened.
    """
    if not is_local(path):
        with path.open("rb") as stream:  # an object store has nothing but files
            yield cast("IO[bytes]", stream)
        return
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | _BINARY)
    try:
        _check_regular(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


@contextlib.contextmanager
def open_append(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Open a local file to append to, and to read; make it if it does not exist.

    Raises:
      UserError: It is a link, or no regular file.
      OSError: It cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _NOFOLLOW | _NONBLOCK | _BINARY
    if not _NOFOLLOW:
        check_not_symlink(path)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            check_not_symlink(path)
        raise
    try:
        _check_regular(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "a+b") as stream:
        yield stream


def check_not_symlink(path: AnyPath) -> None:
    """Raise UserError if a local path is a symbolic link, wherever it leads."""
    if is_local(path) and pathlib.Path(path).is_symlink():
        raise UserError(
            f"{path}: is a link, and a run writes in its own folder alone; "
            "put what it leads to in its place, or make the whole folder the link"
        )


def read_bytes(path: AnyPath, max_bytes: int) -> bytes:
    """Return what a file holds.

    Args:
      path: Local or remote.
      most: Bytes beyond which it is refused, before they are read where its size is known.

    Raises:
      UserError: It is no regular file, or has more bytes.
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

    It is read in pieces: a file may be longer than it said, or grow meanwhile.
    """
    pieces, size = [], 0
    while piece := stream.read(_CHUNK):
        size += len(piece)
        if size > max_bytes:
            raise too_large_error(path, size, max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def iter_lines(stream: IO[bytes], path: AnyPath, max_bytes: int) -> Iterator[bytes]:
    """The lines of a stream, with their ends (UserError: one has more than `max_bytes` bytes)."""
    number = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise UserError(
                f"{path}:{number}: is a line of more than {format_bytes(max_bytes)}; "
                "split it, or put the file back as it was"
            )
        yield line


def too_large_error(path: AnyPath, size: int, max_bytes: int) -> UserError:
    """The error for a file that is larger than its kind may be."""
    return UserError(
        f"{path}: has {format_bytes(size)} or more, and at most {format_bytes(max_bytes)} are read of "
        "such a file; give the right file, or a smaller one"
    )


def format_bytes(size: int) -> str:
    """`12 bytes`, `16 MiB`, `1.5 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _check_regular(path: AnyPath, descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{path}: is {kind} and no regular file; give a file")

"""Read downloaded files up to a limit, so that their content cannot fill the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from train.data.files import AnyPath

MAX_SETTINGS_BYTES = 2**24
"""Limit of a file of settings of a downloaded model: 16 MiB."""

MAX_VOCABULARY_BYTES = 2**28
"""Limit of a tokenizer file: 256 MiB."""

_CHUNK_BYTES = 2**22


def read_bytes(path: AnyPath, max_bytes: int) -> bytes:
    """Return the content of a file.

    Args:
      path: Local or remote file.
      max_bytes: Size above which the file is refused.

    Raises:
      UserError: It is too large.
      OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        return read_all(stream, path, max_bytes)


def read_all(stream: IO[bytes], path: AnyPath, max_bytes: int) -> bytes:
    """Return the rest of a stream (UserError: it has more than `max_bytes` bytes).

    The stream is read in chunks: the length of what is decompressed is not known before.
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

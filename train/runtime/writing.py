"""Write files, local and remote, so that readers see the old or the new content."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterator

from train.errors import UserError, short_reason
from train.files import AnyPath


def is_local(path: AnyPath) -> bool:
    """Return True for a path of this machine's file systems, False for `gs://...` and the like."""
    return "://" not in os.fspath(path)


@contextlib.contextmanager
def explain_write_errors(path: AnyPath) -> Iterator[None]:
    """Raise a UserError that names `path` in place of an OSError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or short_reason(error)
        raise UserError(
            f"{path}: cannot be written ({reason}); "
            "make room there, check its permissions, or give another --workdir"
        ) from error


def write_atomically(path: AnyPath, data: str | bytes) -> None:
    """Write a whole file (text as UTF-8), so that readers see the old or the new content.

    Raises:
      UserError: The file cannot be written; the old content is intact.
    """
    content = data.encode() if isinstance(data, str) else data
    with explain_write_errors(path):
        if not isinstance(path, pathlib.Path):
            path.write_bytes(content)  # an object store shows a file only once it is complete
            return
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                # Without it, a power failure after the rename can leave an empty file.
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def set_aside_file(path: AnyPath, suffix: str) -> AnyPath | None:
    """Rename a file to an unused name `<name>.<suffix>`.

    Returns:
      The new path; None if the file does not exist.

    Raises:
      UserError: The file cannot be renamed.
    """
    with explain_write_errors(path):
        if not path.exists():
            return None
        return path.rename(unused_path(path, suffix))


def unused_path(path: AnyPath, suffix: str) -> AnyPath:
    """Return `<path>.<suffix>`, with a number appended if it exists."""
    candidate = path.with_name(f"{path.name}.{suffix}")
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{suffix}.{number}")
    return candidate

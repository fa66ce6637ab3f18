"""Build the one-line errors about checkpoints from what Orbax and TensorStore raise."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from train.checkpoint.discovery import SkippedCheckpoint
from train.errors import UserError

_MAX_REASON_LENGTH = 200
_SHOWN_CHECKPOINTS = 3


def damaged_error(path: epath.Path, problem: str) -> UserError:
    """Return the error for a requested checkpoint that differs from its manifest."""
    return UserError(
        f"checkpoint {path}: is damaged ({problem}); "
        "ask for another step, or put back what was saved"
    )


def no_valid_checkpoint_error(
    directory: epath.Path, skipped: Sequence[SkippedCheckpoint]
) -> UserError:
    """Return the error for a directory in which every checkpoint is damaged."""
    found = "; ".join(f"step {each.step}: {each.problem}" for each in skipped[:_SHOWN_CHECKPOINTS])
    hidden = len(skipped) - _SHOWN_CHECKPOINTS
    more = f"; and {hidden} more" if hidden > 0 else ""
    return UserError(
        f"checkpoints {directory}: none is as it was saved ({found}{more}); "
        "put back what was saved, or begin anew with another --workdir"
    )


def unreadable_error(path: epath.Path, problem: str) -> UserError:
    """Return the error for a checkpoint that passed verification and cannot be restored."""
    return UserError(
        f"checkpoint {path}: cannot be read ({problem}); "
        "--checkpoint.verify full passes over one that is damaged"
    )


def unwritable_error(path: epath.Path, problem: str) -> UserError:
    """Return the error for a failed save."""
    return UserError(
        f"checkpoint {path}: could not be written ({problem}); "
        "make room there or check its permissions; the checkpoints before it are whole"
    )


@contextlib.contextmanager
def explain_restore_errors(path: epath.Path) -> Iterator[None]:
    """Raise a UserError in place of Orbax's errors about files that it cannot read."""
    try:
        yield
    except Exception as error:
        # Orbax raises a plain `Exception` for an unreadable array. Its subclasses are bugs.
        if type(error) is Exception or isinstance(error, OSError | ValueError | KeyError):
            raise unreadable_error(path, short_reason(error)) from error
        raise


def short_reason(error: Exception) -> str:
    """Return the cause of an error on one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore puts the operating system's error code at the end of a very long line.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _MAX_REASON_LENGTH else f"{line[:_MAX_REASON_LENGTH]}..."

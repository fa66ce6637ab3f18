"""What went wrong with a checkpoint, in one line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from etils import epath

from train.checkpoint.discovery import SkippedCheckpoint
from train.errors import UserError

_REASON_LENGTH = 200


_SHOWN = 3


def damaged_error(path: epath.Path, problem: str) -> UserError:
    """A checkpoint that was asked for is not what was saved."""
    return UserError(
        f"checkpoint {path}: is damaged ({problem}); ask for another step, or put back what was saved"
    )


def no_valid_checkpoint_error(
    directory: epath.Path, skipped: Sequence[SkippedCheckpoint]
) -> UserError:
    """There are checkpoints, and not one to go on from."""
    found = "; ".join(f"step {each.step}: {each.problem}" for each in skipped[:_SHOWN])
    more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
    return UserError(
        f"checkpoints {directory}: none is as it was saved ({found}{more}); "
        "put back what was saved, or begin anew with another --workdir"
    )


def unreadable_error(path: epath.Path, problem: str) -> UserError:
    """A checkpoint whose sizes are right cannot be restored."""
    return UserError(
        f"checkpoint {path}: cannot be read ({problem}); "
        "--checkpoint.verify full passes over one that is damaged"
    )


def unwritable_error(path: epath.Path, problem: str) -> UserError:
    """A save failed."""
    return UserError(
        f"checkpoint {path}: could not be written ({problem});"
        " make room there or check its permissions; the checkpoints before it are whole"
    )


@contextlib.contextmanager
def explain_restore_errors(path: epath.Path) -> Iterator[None]:
    """Turns what Orbax raises for a file that it cannot read into a UserError."""
    try:
        yield
    except Exception as error:
        # Orbax raises a plain Exception for an array that it cannot read.
        if type(error) is Exception or isinstance(error, OSError | ValueError | KeyError):
            raise unreadable_error(path, short_reason(error)) from error
        raise


def short_reason(error: Exception) -> str:
    """What is wrong, in a few words: TensorStore says it at the end of a long line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _REASON_LENGTH else f"{words[:_REASON_LENGTH]}..."

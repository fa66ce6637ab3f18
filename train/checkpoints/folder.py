"""The folder of a run's checkpoints: what is in it, and what leaves it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re

from etils import epath

from train.checkpoints import manifest
from train.data.files import as_user_error

UNFINISHED = ".orbax-checkpoint-tmp"
"""What Orbax adds to a folder until it is whole."""

_STEP = re.compile("0|[1-9][0-9]{0,8}")


def located(directory: str | os.PathLike[str]) -> epath.Path:
    """Orbax takes no relative path."""
    name = os.fspath(directory)
    return epath.Path(name if "://" in name else pathlib.Path(name).absolute())


def saved_steps(directory: epath.Path, *, sealed: bool) -> list[int]:
    """The steps that there are folders of: those with a manifest, or those without; oldest first.

    Raises UserError if the folder cannot be read.
    """
    with as_user_error(str(directory)):
        if not directory.is_dir():
            return []
        steps = [int(path.name) for path in directory.iterdir() if _STEP.fullmatch(path.name)]
        found = [s for s in steps if (directory / str(s) / manifest.NAME).exists() == sealed]
    return sorted(found)


def clear_unfinished(directory: epath.Path) -> None:
    """Removes what a save has left that was killed or failed; it may fill the disk."""
    for path in [
        # Not by glob: a folder's own name may look like a pattern, and match another folder.
        *(path for path in directory.iterdir() if UNFINISHED in path.name),
        *(directory / str(step) for step in saved_steps(directory, sealed=False)),
    ]:
        with contextlib.suppress(OSError):
            path.rmtree()


def remove(directory: epath.Path, step: int) -> None:
    """Removes a checkpoint, its manifest first: what is left of it counts no more."""
    with contextlib.suppress(OSError):  # the next save tries again
        (directory / str(step) / manifest.NAME).unlink()
        (directory / str(step)).rmtree()


def set_aside(directory: epath.Path, step: int, name: str) -> epath.Path:
    """Renames a checkpoint to ``<name>-<step>``, so that the step can be saved again."""
    target, number = directory / f"{name}-{step}", 1
    while target.exists():
        number += 1
        target = directory / f"{name}-{step}-{number}"
    (directory / str(step)).rename(target)
    return target

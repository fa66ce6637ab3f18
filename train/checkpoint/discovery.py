"""List the checkpoints in a directory and find the newest valid one.

All processes of a run get the same answer: process 0 looks, and broadcasts what it finds. On a
network file system two processes may otherwise see different steps and restore different states.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from train.checkpoint.manifest import MANIFEST_NAME
from train.errors import UserError, as_user_error

ORBAX_TMP_MARKER = ".orbax-checkpoint-tmp"
"""Part of a folder's name while Orbax writes it."""

UNFINISHED_ENDING = ".unfinished"
"""Ending of the empty file `<step>.unfinished` beside a checkpoint that is saved or deleted."""

_STEP_NAME = re.compile("0|[1-9][0-9]{0,8}")  # at most nine digits: steps are int32
UNFINISHED_NAME = re.compile(f"({_STEP_NAME.pattern}){re.escape(UNFINISHED_ENDING)}")
_SHOWN_CHECKPOINTS = 3


NEW_START_REMEDY = "fit with another --workdir, or with --from-scratch to begin at step 0 here"
"""Remedy where all checkpoints of a run are lost."""


class SkippedCheckpoint(NamedTuple):
    """Checkpoint that cannot be used."""

    step: int
    problem: str
    """Short description. Empty on processes other than 0."""


class SearchResult(NamedTuple):
    """Outcome of `find_newest_valid`."""

    step: int | None
    """Newest valid step; None if no checkpoint is valid."""
    skipped: list[SkippedCheckpoint]
    """Invalid checkpoints of later steps, newest first."""


def absolute_path(directory: str | os.PathLike[str]) -> epath.Path:
    """Return a local or remote directory as an absolute path: Orbax takes no relative one."""
    name = os.fspath(directory)
    return epath.Path(name if "://" in name else pathlib.Path(name).absolute())


def list_steps(directory: epath.Path) -> list[int]:
    """Return the steps that have a checkpoint, oldest first, damaged ones included.

    Args:
      directory: Directory of all checkpoints; it need not exist.

    Raises:
      UserError: The directory cannot be read.
    """
    with as_user_error(str(directory)):
        # A new run has no directory yet; it is created by the first save.
        if not directory.is_dir():
            return []
        # Other names are unfinished saves, and checkpoints that were set aside.
        names = {path.name for path in directory.iterdir()}
        steps = [int(name) for name in names if _STEP_NAME.fullmatch(name)]
        # A folder without a manifest is one that lost it, unless it is marked as unfinished: only
        # that was never complete. Only a marked one is looked into, as an object store bills and
        # delays every read.
        return sorted(
            step
            for step in steps
            if f"{step}{UNFINISHED_ENDING}" not in names
            or (directory / str(step) / MANIFEST_NAME).exists()
        )


def find_newest_valid(
    steps: Iterable[int], find_problem: Callable[[int], str | None]
) -> SearchResult:
    """Return the newest step for which process 0 finds no problem, on every process."""
    skipped: list[SkippedCheckpoint] = []
    valid: list[int] = []
    # Verifying reads and hashes every file, so only one process does it. Newest first, and no
    # further than the first valid one: the older ones are not needed.
    if jax.process_index() == 0:
        for step in sorted(steps, reverse=True):
            problem = find_problem(step)
            if problem is None:
                valid.append(step)
                break
            skipped.append(SkippedCheckpoint(step, problem))
    # Every process broadcasts both lists, also where they are empty: a collective needs all.
    valid = broadcast_integers(valid)
    skipped_steps = broadcast_integers([each.step for each in skipped])
    if jax.process_index() != 0:
        skipped = [SkippedCheckpoint(step, "") for step in skipped_steps]
    return SearchResult(valid[0] if valid else None, skipped)


def no_valid_checkpoint_error(
    directory: epath.Path, skipped: Sequence[SkippedCheckpoint]
) -> UserError:
    """Return the error for a directory in which every checkpoint is damaged."""
    problems = "; ".join(
        f"step {each.step}: {each.problem}" for each in skipped[:_SHOWN_CHECKPOINTS]
    )
    hidden = len(skipped) - _SHOWN_CHECKPOINTS
    more = f"; and {hidden} more" if hidden > 0 else ""
    return UserError(
        f"checkpoints {directory}: none is intact ({problems}{more}); restore what was "
        f"saved, or train anew: {NEW_START_REMEDY}"
    )


def broadcast_integers(values: Sequence[int]) -> list[int]:
    """Return the values of process 0 on every process.

    This runs a program on the devices. A thread beside the training loop must not call it: the
    order of programs would differ between processes, and they would deadlock.
    """
    if jax.process_count() == 1:
        return list(values)
    # Their number first, so that all processes run the same program with an array of its length.
    broadcast = ocp.multihost.broadcast_one_to_all
    count = int(broadcast(np.int32(len(values))))
    sent = np.resize(np.array([*values, 0], np.int32), count)  # that of process 0 counts
    return [int(each) for each in broadcast(sent)] if count else []

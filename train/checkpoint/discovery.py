"""The folder of a run's checkpoints: what is in it, and what leaves it.

Which checkpoints are kept.

Looking for checkpoints that are as they were saved; all hosts come to the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from train.checkpoint import manifest
from train.data.files import as_user_error

ORBAX_TMP_MARKER = ".orbax-checkpoint-tmp"
"""What Orbax adds to a folder until it is whole."""


_STEP = re.compile("0|[1-9][0-9]{0,8}")


def absolute_path(directory: str | os.PathLike[str]) -> epath.Path:
    """Orbax takes no relative path."""
    name = os.fspath(directory)
    return epath.Path(name if "://" in name else pathlib.Path(name).absolute())


def list_steps(directory: epath.Path, *, committed: bool) -> list[int]:
    """The steps that there are folders of: those with a manifest, or those without; oldest first.

    Raises UserError if the folder cannot be read.
    """
    with as_user_error(str(directory)):
        if not directory.is_dir():
            return []
        steps = [int(path.name) for path in directory.iterdir() if _STEP.fullmatch(path.name)]
        found = [
            s for s in steps if (directory / str(s) / manifest.MANIFEST_NAME).exists() == committed
        ]
    return sorted(found)


def delete_unfinished(directory: epath.Path) -> None:
    """Removes what a save has left that was killed or failed; it may fill the disk."""
    for path in [
        # Not by glob: a folder's own name may look like a pattern, and match another folder.
        *(path for path in directory.iterdir() if ORBAX_TMP_MARKER in path.name),
        *(directory / str(step) for step in list_steps(directory, committed=False)),
    ]:
        with contextlib.suppress(OSError):
            path.rmtree()


def delete_checkpoint(directory: epath.Path, step: int) -> None:
    """Removes a checkpoint, its manifest first: what is left of it counts no more."""
    with contextlib.suppress(OSError):  # the next save tries again
        (directory / str(step) / manifest.MANIFEST_NAME).unlink()
        (directory / str(step)).rmtree()


def set_aside_checkpoint(directory: epath.Path, step: int, name: str) -> epath.Path:
    """Renames a checkpoint to ``<name>-<step>``, so that the step can be saved again."""
    target, number = directory / f"{name}-{step}", 1
    while target.exists():
        number += 1
        target = directory / f"{name}-{step}-{number}"
    (directory / str(step)).rename(target)
    return target


@dataclasses.dataclass
class RetentionPolicy:
    """What is asked for; a checkpoint is kept for any one of these reasons."""

    keep_last: int = 1
    """How many of the newest."""
    save_every: int = 0
    """Steps between the saves that are due."""
    keep_last_due: int = 1
    """How many of the newest that were due; 1 asks for none beside `keep_last`."""
    keep_min_age: int = 0
    """Of those that were due two more, so that one is at least so many steps old, and not more than
    twice as many and `every`; 0: none."""
    keep_every: int = 0
    """Those at multiples of this; 0: none."""
    best_step: int | None = None
    """The step of the best."""
    pinned_steps: set[int] = dataclasses.field(default_factory=set)
    """Steps to be kept whatever comes."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep {self.keep_last}: the newest is always kept")

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Those of the steps that stay."""
        steps = sorted(steps)
        kept = {*steps[-self.keep_last :], *self.pinned_steps}
        kept |= {step for step in steps if step == self.best_step}
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.save_every and self.keep_last_due > 1:
            kept |= set(
                [step for step in steps if step % self.save_every == 0][-self.keep_last_due :]
            )
        if self.save_every and self.keep_min_age:
            multiple = math.ceil(self.keep_min_age / self.save_every) * self.save_every
            kept |= set([step for step in steps if step % multiple == 0][-2:])
        return kept.intersection(steps)


_MOST = 1024  # numbers that hosts tell each other at once


_NOTHING = -1


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that is not to be used."""

    step: int
    problem: str
    """In a few words; process 0 alone knows them."""


class SearchResult(NamedTuple):
    """The outcome of a search."""

    step: int | None
    """The newest that is whole; None if none is."""
    skipped: list[SkippedCheckpoint]
    """Those newer than it, the newest first."""


def find_newest_valid(
    steps: Iterable[int], find_problem: Callable[[int], str | None]
) -> SearchResult:
    """The newest of the steps with no problem, as process 0 sees it."""
    passed_over = []
    whole: list[int] = []
    if jax.process_index() == 0:
        for step in sorted(steps, reverse=True):
            why = find_problem(step)
            if why is None:
                whole.append(step)
                break
            passed_over.append(SkippedCheckpoint(step, why))
    whole, others = (
        broadcast_integers(whole),
        broadcast_integers([each.step for each in passed_over]),
    )
    if jax.process_index() != 0:
        passed_over = [SkippedCheckpoint(step, "") for step in others]
    return SearchResult(whole[0] if whole else None, passed_over)


def broadcast_integers(values: Sequence[int]) -> list[int]:
    """What process 0 has, on every process. Not from a thread beside training: it needs devices."""
    if jax.process_count() == 1:
        return list(values)
    padded = np.full(_MOST, _NOTHING, np.int32)
    padded[: len(values)] = values
    return [int(each) for each in ocp.multihost.broadcast_one_to_all(padded) if each != _NOTHING]

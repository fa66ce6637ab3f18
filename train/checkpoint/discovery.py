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


@dataclasses.dataclass
class Retention:
    """What is asked for; a checkpoint is kept for any one of these reasons."""

    keep: int = 1
    """How many of the newest."""
    every: int = 0
    """Steps between the saves that are due."""
    average: int = 1
    """How many of the newest that were due; 1 asks for none beside `keep`."""
    apart: int = 0
    """Of those that were due two more, so that one is at least so many steps old, and not more than
    twice as many and `every`; 0: none."""
    keep_every: int = 0
    """Those at multiples of this; 0: none."""
    best: int | None = None
    """The step of the best."""
    pinned: set[int] = dataclasses.field(default_factory=set)
    """Steps to be kept whatever comes."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep {self.keep}: the newest is always kept")

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Those of the steps that stay."""
        steps = sorted(steps)
        kept = {*steps[-self.keep :], *self.pinned}
        kept |= {step for step in steps if step == self.best}
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.every and self.average > 1:
            kept |= set([step for step in steps if step % self.every == 0][-self.average :])
        if self.every and self.apart:
            multiple = math.ceil(self.apart / self.every) * self.every
            kept |= set([step for step in steps if step % multiple == 0][-2:])
        return kept.intersection(steps)


_MOST = 1024  # numbers that hosts tell each other at once


_NOTHING = -1


class PassedOver(NamedTuple):
    """A checkpoint that is not to be used."""

    step: int
    why: str
    """In a few words; process 0 alone knows them."""


class Found(NamedTuple):
    """The outcome of a search."""

    step: int | None
    """The newest that is whole; None if none is."""
    passed_over: list[PassedOver]
    """Those newer than it, the newest first."""


def newest(steps: Iterable[int], problem: Callable[[int], str | None]) -> Found:
    """The newest of the steps with no problem, as process 0 sees it."""
    passed_over = []
    whole: list[int] = []
    if jax.process_index() == 0:
        for step in sorted(steps, reverse=True):
            why = problem(step)
            if why is None:
                whole.append(step)
                break
            passed_over.append(PassedOver(step, why))
    whole, others = told(whole), told([each.step for each in passed_over])
    if jax.process_index() != 0:
        passed_over = [PassedOver(step, "") for step in others]
    return Found(whole[0] if whole else None, passed_over)


def told(numbers: Sequence[int]) -> list[int]:
    """What process 0 has, on every process. Not from a thread beside training: it needs devices."""
    if jax.process_count() == 1:
        return list(numbers)
    padded = np.full(_MOST, _NOTHING, np.int32)
    padded[: len(numbers)] = numbers
    return [int(each) for each in ocp.multihost.broadcast_one_to_all(padded) if each != _NOTHING]

"""Decide which checkpoints to keep, and delete or rename the others."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable

from etils import epath

from train.checkpoint.discovery import ORBAX_TMP_MARKER, UNFINISHED_ENDING, UNFINISHED_NAME
from train.checkpoint.manifest import MANIFEST_NAME


@dataclasses.dataclass
class RetentionPolicy:
    """Reasons to keep a checkpoint; one reason is enough.

    A checkpoint is *due* at multiples of `save_every`. Saves in between, of a run that was
    preempted, do not count for `keep_last_due` and `keep_min_age`, so that an interrupted run
    keeps the same checkpoints to average and to roll back to as an uninterrupted one.
    """

    keep_last: int = 1
    """Number of newest checkpoints to keep, at least 1."""
    save_every: int = 0
    """Steps between due checkpoints; 0: no checkpoint is due."""
    keep_last_due: int = 1
    """Number of newest due checkpoints to keep; 1 adds nothing to `keep_last`."""
    keep_min_age: int = 0
    """Keep a due checkpoint that is at least this many steps old, and at most twice as many plus
    `save_every`. Two are kept for it. 0: off."""
    keep_every: int = 0
    """Keep checkpoints at multiples of this many steps; 0: off."""
    best_step: int | None = None
    """Step of the best evaluation."""
    pinned_steps: set[int] = dataclasses.field(default_factory=set)
    """Steps to keep in any case."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep {self.keep_last}: the newest is always kept")

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Return the subset of the steps to keep."""
        steps = sorted(steps)
        # By step numbers alone, never by file times: a resumed run decides as an unbroken one.
        keep = {*steps[-self.keep_last :], *self.pinned_steps}
        keep |= {step for step in steps if step == self.best_step}
        if self.keep_every:
            keep |= {step for step in steps if step % self.keep_every == 0}
        if self.save_every and self.keep_last_due > 1:
            # For the mean of the last checkpoints, and for rollbacks: the newest may lie within an
            # anomaly.
            due = [step for step in steps if step % self.save_every == 0]
            keep |= set(due[-self.keep_last_due :])
        if self.save_every and self.keep_min_age:
            # Two neighbouring multiples of a spacing of at least `keep_min_age` steps: the older
            # one is always old enough, and the newer one is the older one of the next pair.
            spacing = math.ceil(self.keep_min_age / self.save_every) * self.save_every
            keep |= set([step for step in steps if step % spacing == 0][-2:])
        # A pinned step need not have been saved yet.
        return keep.intersection(steps)


def delete_unfinished(directory: epath.Path) -> None:
    """Delete what killed and failed saves have left, which may fill the disk.

    A folder of a step is deleted only if it is marked as unfinished: one that merely lacks its
    manifest has lost it.
    """
    # Not by glob: the directory's own name may contain pattern characters.
    for path in list(directory.iterdir()):
        # On a failure the next save tries again; what is left does not count as a checkpoint.
        with contextlib.suppress(OSError):
            if ORBAX_TMP_MARKER in path.name:
                path.rmtree()
            elif UNFINISHED_NAME.fullmatch(path.name):
                checkpoint = directory / path.name.removesuffix(UNFINISHED_ENDING)
                if checkpoint.exists() and not (checkpoint / MANIFEST_NAME).exists():
                    checkpoint.rmtree()
                path.unlink()


def unfinished_mark(directory: epath.Path, step: int) -> epath.Path:
    """Return the path of the mark beside a checkpoint that is being saved or deleted."""
    return directory / f"{step}{UNFINISHED_ENDING}"


def delete_checkpoint(directory: epath.Path, step: int) -> None:
    """Delete a checkpoint. Its manifest goes first, so that a partial deletion does not count."""
    with contextlib.suppress(OSError):  # the next save deletes what is left
        mark = unfinished_mark(directory, step)
        mark.write_bytes(b"")
        (directory / str(step) / MANIFEST_NAME).unlink(missing_ok=True)
        (directory / str(step)).rmtree()
        mark.unlink()


def set_aside_checkpoint(directory: epath.Path, step: int, name: str) -> epath.Path:
    """Rename a checkpoint to `<name>-<step>`, so that the step can be saved again."""
    # Such a name is not a step number, so the folder is neither listed nor deleted.
    target, number = directory / f"{name}-{step}", 1
    while target.exists():
        number += 1
        target = directory / f"{name}-{step}-{number}"
    (directory / str(step)).rename(target)
    return target

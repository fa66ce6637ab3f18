"""Which checkpoints are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable


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

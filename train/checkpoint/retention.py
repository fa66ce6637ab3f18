"""Which checkpoints are kept, by Orbax's preservation policies."""

import dataclasses
import math
import types
from collections.abc import Iterable, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies


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
        # By step numbers alone, never by file times: a resumed run decides as an unbroken one.
        reasons = [
            policies.LatestN(self.keep_last),
            policies.CustomSteps([*self.pinned_steps, self.best_step]),
        ]
        if self.keep_every:
            reasons.append(policies.EveryNSteps(self.keep_every))
        if self.save_every and self.keep_last_due > 1:
            # For the mean of the last checkpoints, and for rollbacks: the newest may lie within an
            # anomaly.
            reasons.append(policies.EveryNSteps(self.save_every, max_to_keep=self.keep_last_due))
        if self.save_every and self.keep_min_age:
            # Two neighbouring multiples of a spacing of at least `keep_min_age` steps: the older
            # one is always old enough, and the newer one is the older one of the next pair.
            spacing = math.ceil(self.keep_min_age / self.save_every) * self.save_every
            reasons.append(policies.EveryNSteps(spacing, max_to_keep=2))
        infos = [types.SimpleNamespace(step=step) for step in sorted(steps)]
        kept = policies.AnyPreservationPolicy(reasons).should_preserve(
            infos, context=policies.PreservationContext()
        )
        return {info.step for info, keep in zip(infos, kept, strict=True) if keep}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return whether to keep each checkpoint (the interface of Orbax's policies)."""
        kept = self.steps_to_keep(info.step for info in checkpoints)
        return [info.step in kept for info in checkpoints]

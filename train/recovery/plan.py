"""What to do about trouble: a pure function of it, of what was done before, and of what is kept."""

import dataclasses
from collections.abc import Sequence

from train.recovery.config import RecoveryConfig


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Steps in a row out of line, as many as recovery has patience for."""

    first: int
    step: int
    """The last of them."""
    cursor: int
    """The batch after the one of that step."""
    why: str
    """What was wrong with that step, in words."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Going back, for a trouble."""

    first: int
    """The first step out of line."""
    step: int
    """The step at which it was decided."""
    checkpoint: int
    """The step to go back to."""
    cursor: int
    """The batch to go on with."""
    rate: float
    """What the learning rate is multiplied by from then on."""
    tries: int
    """1 for the first of one trouble."""


def plan(
    trouble: Trouble, before: Rollback | None, checkpoints: Sequence[int], config: RecoveryConfig
) -> Rollback | None:
    """How to go back; None if that was tried often enough.

    Trouble is what it was before if it comes before the run has got `back` steps beyond it.

    Args:
      trouble: What there is.
      before: The last rollback of the run.
      checkpoints: The steps that can be gone back to, beside the start of the run.
      config: How often, and how far.
    """
    again = before is not None and trouble.first <= before.step + config.back
    tries = before.tries + 1 if before and again else 1
    if tries > config.tries:
        return None
    return Rollback(
        first=trouble.first,
        step=trouble.step,
        checkpoint=target(trouble.first, checkpoints, config.back),
        cursor=trouble.cursor + config.skip,
        rate=(before.rate if before else 1.0) * (config.rate if tries > 1 else 1.0),
        tries=tries,
    )


def target(first: int, checkpoints: Sequence[int], back: int) -> int:
    """The newest checkpoint `back` steps before step `first`, else the oldest before it, else 0."""
    before = [step for step in sorted(checkpoints) if step < first]
    far = [step for step in before if step <= first - back]
    return far[-1] if far else before[0] if before else 0

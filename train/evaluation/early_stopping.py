"""The best evaluation of a run so far, and when to wait for a better one no longer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from train.errors import UserError
from train.tasks.base import Metric


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    """Part of every checkpoint, so that a run that was resumed stops where it would have."""

    step: int = 0
    """When it was; 0: there was none yet."""
    value: float = math.nan
    """What the task is judged by."""
    waited: int = 0
    """Evaluations since, none of them better."""

    def after_evaluation(self, step: int, value: float, metric: Metric) -> BestEvaluation:
        """What it is once there has been one more evaluation."""
        first = not self.step and math.isfinite(value)
        if first or metric.is_better(value, self.value):
            return BestEvaluation(step, value)
        return dataclasses.replace(self, waited=self.waited + 1)

    def patience_exhausted(self, patience: int) -> bool:
        """Whether so many evaluations in a row were no better; never with patience 0."""
        return 0 < patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return dataclasses.asdict(self) if self.step else {"waited": self.waited}

    @classmethod
    def from_json(cls, data: Any) -> BestEvaluation:
        """Read it back (UserError: it is not what `to_json` gives)."""
        try:
            best = cls(**data)
            counts = (best.step, best.waited)
            sound = all(type(count) is int and 0 <= count < 2**31 for count in counts)
            if not sound or type(best.value) not in (int, float):
                raise TypeError("a value of another type")
        except TypeError as error:
            raise UserError(
                f"checkpoint: what it says of the best evaluation is damaged ({error}); "
                "remove it, and an older one is taken"
            ) from error
        return best

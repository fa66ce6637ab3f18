"""Track the best evaluation of a run, and stop the run when it gets no better."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from train.tasks.task import Metric


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    """Best evaluation so far.

    Every checkpoint stores it, so that a resumed run stops where an uninterrupted one would. The
    field names are those of the checkpoint's metadata.
    """

    step: int = 0
    """Step of the evaluation; 0: none yet."""
    value: float = math.nan
    """Value of the task's selection metric."""
    waited: int = 0
    """Number of evaluations since, none of them better."""

    def after_evaluation(self, step: int, value: float, metric: Metric) -> "BestEvaluation":
        """Return the best evaluation after one more."""
        first = not self.step and math.isfinite(value)
        if first or metric.is_better(value, self.value):
            return BestEvaluation(step, value)
        return dataclasses.replace(self, waited=self.waited + 1)

    def patience_exhausted(self, patience: int) -> bool:
        """Return True after `patience` evaluations without a better one; never with 0."""
        return 0 < patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. JSON has no NaN, so `value` is left out until there is one."""
        return dataclasses.asdict(self) if self.step else {"waited": self.waited}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "BestEvaluation":
        """Return the best evaluation that a checkpoint's metadata hold."""
        return cls(**metadata.get("best", {}))

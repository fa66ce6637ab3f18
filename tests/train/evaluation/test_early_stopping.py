import json
import math

import pytest

from train.evaluation.early_stopping import BestEvaluation
from train.tasks.task import Metric

LOSS, ACCURACY = Metric("loss", lower_is_better=True), Metric("accuracy", lower_is_better=False)


def best_of(values: list[float], metric: Metric) -> list[tuple[int, int]]:
    """Return the best step after evaluations at steps 10, 20, ..., and their number since."""
    best, result = BestEvaluation(), []
    for number, value in enumerate(values, start=1):
        best = best.after_evaluation(10 * number, value, metric)
        result.append((best.step, best.waited))
    return result


def test_best_value_and_evaluations_since() -> None:
    values = [3.0, 2.0, 2.5, 2.0, 1.5, 9.0]
    assert best_of(values, LOSS) == [(10, 0), (20, 0), (20, 1), (20, 2), (50, 0), (50, 1)]
    assert best_of(values, ACCURACY) == [(10, 0), (10, 1), (10, 2), (10, 3), (10, 4), (60, 0)]


def test_nan_is_never_the_best() -> None:
    values = [math.nan, math.inf, 2.0, math.nan]
    assert best_of(values, LOSS) == [(0, 1), (0, 2), (30, 0), (30, 1)]


@pytest.mark.parametrize(("patience", "ends"), [(0, []), (1, [2, 3]), (2, [3]), (3, [])])
def test_patience(patience: int, ends: list[int]) -> None:
    best, result = BestEvaluation(), []
    for number, value in enumerate([1.0, 2.0, 2.0], start=1):
        best = best.after_evaluation(number, value, LOSS)
        if best.patience_exhausted(patience):
            result.append(number)
    assert result == ends


@pytest.mark.parametrize(
    "best", [BestEvaluation(), BestEvaluation(waited=2), BestEvaluation(7, 0.1 + 0.2, 3)]
)
def test_json_round_trip(best: BestEvaluation) -> None:
    text = json.dumps(best.to_json(), allow_nan=False)
    again = BestEvaluation.from_metadata({"best": json.loads(text)})
    assert repr(again) == repr(best)  # NaN is not itself

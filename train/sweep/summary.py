"""Summary of a sweep: mean and spread over seeds of every setting, best first."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.sweep.folder import RunResult
from train.sweep.grid import SweepRun, short_names


@dataclasses.dataclass(frozen=True)
class SettingSummary:
    """Results of the runs of one setting, which differ in their seeds."""

    settings: Mapping[str, str]
    runs: tuple[tuple[SweepRun, RunResult], ...]

    @property
    def values(self) -> list[float]:
        """Selection metric of the runs that finished, finite values only."""
        found = [result.value for _, result in self.runs if result.status == "finished"]
        return [value for value in found if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN if no run finished."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Sample standard deviation over seeds; NaN with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of every metric over the runs that finished."""
        finished = [result.metrics for _, result in self.runs if result.status == "finished"]
        names = (
            [name for name in finished[0] if all(name in each for each in finished)]
            if (finished)
            else []
        )
        return {name: statistics.fmean(each[name] for each in finished) for name in names}

    @property
    def seconds(self) -> float:
        """Mean wall time of the runs that finished."""
        found = [result.seconds for _, result in self.runs if result.status == "finished"]
        return statistics.fmean(found) if found else math.nan


@dataclasses.dataclass(frozen=True)
class SweepSummary:
    """All settings of a sweep, best first, and the metric that orders them."""

    metric: str
    lower_is_better: bool
    settings: tuple[SettingSummary, ...]

    @property
    def num_failed(self) -> int:
        """Number of runs that failed."""
        return sum(result.status == "failed" for each in self.settings for _, result in each.runs)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`; what is not finite is None."""
        return {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "failed": self.num_failed,
            "settings": [
                {
                    "settings": dict(each.settings),
                    "mean": _finite(each.mean),
                    "standard_deviation": _finite(each.deviation),
                    "seconds": _finite(each.seconds),
                    "metrics": {name: _finite(value) for name, value in each.metrics.items()},
                    "runs": [_run_as_dict(run, result) for run, result in each.runs],
                }
                for each in self.settings
            ],
        }


def summarize(runs: Sequence[SweepRun], results: Mapping[str, RunResult]) -> SweepSummary:
    """Group the runs by their settings and order the groups by the mean of the metric."""
    groups: dict[tuple[tuple[str, str], ...], list[tuple[SweepRun, RunResult]]] = {}
    for run in runs:
        groups.setdefault(tuple(run.settings.items()), []).append((run, results[run.name]))
    finished = [each for each in results.values() if each.status == "finished"]
    metric, lower = (finished[0].metric, finished[0].lower_is_better) if finished else ("", True)
    settings = [SettingSummary(dict(key), tuple(group)) for key, group in groups.items()]

    def rank(each: SettingSummary) -> float:
        if not math.isfinite(each.mean):
            return math.inf
        return each.mean if lower else -each.mean

    return SweepSummary(metric, lower, tuple(sorted(settings, key=rank)))


def print_summary(summary: SweepSummary, title: str, console: Console | None = None) -> None:
    """Print the table to a console, by default standard output."""
    fields = list(summary.settings[0].settings)
    labels = short_names(fields)
    table = Table(title=title, title_justify="left")
    for field in fields:
        table.add_column(labels[field])
    for name in (summary.metric or "metric", "spread", "runs", "seconds"):
        table.add_column(name, justify="right")
    for each in summary.settings:
        failed = len(each.runs) - len(each.values)
        table.add_row(
            *each.settings.values(),
            _number(each.mean),
            f"± {each.deviation:.4f}" if math.isfinite(each.deviation) else "-",
            str(len(each.values)) + (f" ({failed} failed)" if failed else ""),
            f"{each.seconds:.0f}" if math.isfinite(each.seconds) else "-",
        )
    (console or Console()).print(table)


def _run_as_dict(run: SweepRun, result: RunResult) -> dict[str, Any]:
    plain = dataclasses.asdict(result)
    plain["metrics"] = {name: _finite(value) for name, value in result.metrics.items()}
    return {"name": run.name, "seed": run.experiment.seed, **plain}


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "failed"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None

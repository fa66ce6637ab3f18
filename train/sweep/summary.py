"""Summary of a sweep: mean and spread over seeds of every setting, as a table and as a figure."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.figures import COLORS, DASHES, figure_style, png
from train.files import AnyPath
from train.runtime.writing import write_atomically
from train.sweep.grid import SweepRun, short_names
from train.sweep.sweep_folder import RunResult
from train.telemetry.event_log import finite_or_none


@dataclasses.dataclass(frozen=True)
class SettingSummary:
    """Results of the runs of one setting, which differ in their seeds."""

    settings: Mapping[str, str]
    runs: tuple[tuple[SweepRun, RunResult], ...]

    @property
    def finished(self) -> list[RunResult]:
        """Results of the runs that finished."""
        return [result for _, result in self.runs if result.status == "finished"]

    @property
    def values(self) -> list[float]:
        """Selection metric of the runs that finished, finite values only."""
        return [each.value for each in self.finished if math.isfinite(each.value)]

    @property
    def num_failed(self) -> int:
        """Number of runs that failed."""
        return len(self.runs) - len(self.finished)

    @property
    def num_diverged(self) -> int:
        """Number of runs that finished with a metric that is not finite."""
        return len(self.finished) - len(self.values)

    @property
    def mean(self) -> float:
        """Mean over the seeds that stayed finite; NaN without one."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Sample standard deviation over seeds; NaN with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of every metric that all runs that finished have."""
        rows = [result.metrics for result in self.finished]
        names = [name for name in rows[0] if all(name in row for row in rows)] if rows else []
        return {name: statistics.fmean(row[name] for row in rows) for name in names}

    @property
    def seconds(self) -> float:
        """Mean wall time of the runs that finished."""
        return statistics.fmean([r.seconds for r in self.finished]) if self.finished else math.nan


@dataclasses.dataclass(frozen=True)
class SweepSummary:
    """All settings of a sweep, best first, and the metric that orders them."""

    metric: str
    lower_is_better: bool
    settings: tuple[SettingSummary, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`; what is not finite is None."""
        plain: dict[str, Any] = {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "failed": sum(each.num_failed for each in self.settings),
            "diverged": sum(each.num_diverged for each in self.settings),
            "settings": [
                {
                    "settings": dict(each.settings),
                    "mean": each.mean,
                    "standard_deviation": each.deviation,
                    "seconds": each.seconds,
                    "metrics": each.metrics,
                    "runs": [_run_as_dict(run, result) for run, result in each.runs],
                }
                for each in self.settings
            ],
        }
        finite: dict[str, Any] = finite_or_none(plain)
        return finite


def _run_as_dict(run: SweepRun, result: RunResult) -> dict[str, Any]:
    return {"name": run.name, "seed": run.experiment.seed, **dataclasses.asdict(result)}


def summarize(runs: Sequence[SweepRun], results: Mapping[str, RunResult]) -> SweepSummary:
    """Group the runs by their settings and order the groups by the mean of the metric.

    Settings with a seed that diverged come after the others: they cannot be relied on, and the mean
    of the seeds that are left is of the lucky ones.
    """
    groups: dict[tuple[tuple[str, str], ...], list[tuple[SweepRun, RunResult]]] = {}
    for run in runs:
        groups.setdefault(tuple(run.settings.items()), []).append((run, results[run.name]))
    finished = [each for each in results.values() if each.status == "finished"]
    metric, lower = (finished[0].metric, finished[0].lower_is_better) if finished else ("", True)
    settings = [SettingSummary(dict(key), tuple(group)) for key, group in groups.items()]

    # NaN compares False with everything: in a sort it would leave the others out of order.
    def rank(each: SettingSummary) -> tuple[bool, float]:
        if not each.values:
            return True, math.inf
        return each.num_diverged > 0, each.mean if lower else -each.mean

    return SweepSummary(metric, lower, tuple(sorted(settings, key=rank)))


def print_summary(summary: SweepSummary, title: str, console: Console | None = None) -> None:
    """Print the table to a console, by default standard output."""
    labels = short_names(list(summary.settings[0].settings))
    table = Table(title=escape(title), title_justify="left")
    for label in labels.values():
        table.add_column(label)
    for name in (summary.metric or "metric", "spread", "runs", "seconds"):
        table.add_column(name, justify="right")
    for each in summary.settings:
        counts = (("failed", each.num_failed), ("diverged", each.num_diverged))
        others = ", ".join(f"{count} {name}" for name, count in counts if count)
        table.add_row(
            *map(escape, each.settings.values()),
            f"{each.mean:.4f}" if each.values else "-",
            f"± {each.deviation:.4f}" if math.isfinite(each.deviation) else "-",
            str(len(each.values)) + (f" ({others})" if others else ""),
            f"{each.seconds:.0f}" if each.finished else "-",
        )
    (console or Console()).print(table)


LOG_RATIO = 2.5
"""Ratio of the largest to the smallest value from which the axis of a field is logarithmic."""

MAX_LEGEND_ENTRIES = 12
MAX_NAMED_VALUES = 8
"""Values of the horizontal axis beyond which matplotlib chooses the ticks."""


@figure_style()
def plot_sweep(summary: SweepSummary, path: AnyPath) -> bool:
    """Draw the mean over seeds with its standard deviation, and every run as a point.

    The horizontal axis has the numeric field of the most values, or else the settings as
    categories.

    Returns:
      True if the figure was drawn; False if no run finished.

    Raises:
      UserError: The file cannot be written.
    """
    settings = [each for each in summary.settings if each.values]
    if not settings:
        return False
    from matplotlib.figure import Figure  # importing it takes half a second

    labels, field = short_names(list(settings[0].settings)), main_field(settings)
    lines: dict[str, list[SettingSummary]] = {}
    for each in settings:
        others = [f"{labels[name]}={x}" for name, x in each.settings.items() if name != field]
        lines.setdefault(_plain(", ".join(others)) if field else "", []).append(each)
    figure = Figure(figsize=(7, 4.4))
    axes = figure.subplots()
    for number, (label, group) in enumerate(sorted(lines.items())):
        if field:
            group.sort(key=lambda each: float(each.settings[field]))
        x = [float(each.settings[field]) if field else settings.index(each) for each in group]
        spread = [each.deviation if math.isfinite(each.deviation) else 0.0 for each in group]
        color, marker = COLORS[number % len(COLORS)], "osD^v"[number % 5]
        axes.errorbar(
            x,
            [each.mean for each in group],
            spread,
            linestyle=DASHES[number % len(DASHES)] if field else "none",
            color=color,
            marker=marker,
            capsize=3,
            label=label or None,
        )
        for place, each in zip(x, group, strict=True):
            axes.scatter([place] * len(each.values), each.values, s=9, color=color, marker=marker)
    if field:
        numbers = [float(each.settings[field]) for each in settings]
        if min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_RATIO:
            axes.set_xscale("log")
        distinct = sorted(set(numbers))
        if len(distinct) <= MAX_NAMED_VALUES:
            axes.minorticks_off()
            axes.set_xticks(distinct, [f"{value:g}" for value in distinct])
        axes.set_xlabel(labels[field].replace("_", " "))
        if 1 < len(lines) <= MAX_LEGEND_ENTRIES:
            axes.legend()
    else:
        names = [_plain("\n".join(each.settings.values())) or "all" for each in settings]
        axes.set_xticks(range(len(settings)), names, fontsize="small")
        axes.set_xlim(-0.5, len(settings) - 0.5)
        axes.set_xlabel(", ".join(labels.values()) or "setting")
    arrow = "lower" if summary.lower_is_better else "higher"
    axes.set_ylabel(f"held-out {summary.metric.replace('_', ' ')} ({arrow} is better)")
    write_atomically(path, png(figure))
    return True


def main_field(settings: Sequence[SettingSummary]) -> str | None:
    """Return the numeric field with the most values; None without a numeric field that varies."""
    counts = {}
    for field in settings[0].settings:
        texts = {each.settings[field] for each in settings}
        if len(texts) > 1 and all(map(_is_number, texts)):
            counts[field] = len(texts)
    return max(counts, key=lambda field: counts[field]) if counts else None


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formulas."""
    return text.replace("$", r"\$")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False

"""Summary of a sweep: mean and spread over seeds of every setting, as a table and as a figure."""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.data.files import AnyPath
from train.runtime.writing import write_atomically
from train.sweep.grid import SweepRun, short_names
from train.sweep.sweep_folder import RunResult
from train.telemetry.event_log import finite_or_none

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class SettingSummary:
    """Results of the runs of one setting, which differ in their seeds."""

    settings: Mapping[str, str]
    runs: tuple[tuple[SweepRun, RunResult], ...]

    @property
    def values(self) -> list[float]:
        """Selection metric of the runs that finished, finite values only."""
        finished = [result.value for _, result in self.runs if result.status == "finished"]
        return [value for value in finished if math.isfinite(value)]

    @property
    def num_failed(self) -> int:
        """Number of runs that failed."""
        return sum(result.status == "failed" for _, result in self.runs)

    @property
    def num_diverged(self) -> int:
        """Number of runs that finished with a metric that is not finite."""
        return len(self.runs) - len(self.values) - self.num_failed

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
        finished = [result.seconds for _, result in self.runs if result.status == "finished"]
        return statistics.fmean(finished) if finished else math.nan


@dataclasses.dataclass(frozen=True)
class SweepSummary:
    """All settings of a sweep, best first, and the metric that orders them."""

    metric: str
    lower_is_better: bool
    settings: tuple[SettingSummary, ...]

    @property
    def num_failed(self) -> int:
        """Number of runs that failed."""
        return sum(each.num_failed for each in self.settings)

    @property
    def num_diverged(self) -> int:
        """Number of runs that finished with a metric that is not finite."""
        return sum(each.num_diverged for each in self.settings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`; what is not finite is None."""
        plain: dict[str, Any] = {
            "metric": self.metric,
            "lower_is_better": self.lower_is_better,
            "failed": self.num_failed,
            "diverged": self.num_diverged,
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
        if not math.isfinite(each.mean):
            return True, math.inf
        return each.num_diverged > 0, each.mean if lower else -each.mean

    return SweepSummary(metric, lower, tuple(sorted(settings, key=rank)))


def print_summary(summary: SweepSummary, title: str, console: Console | None = None) -> None:
    """Print the table to a console, by default standard output."""
    fields = list(summary.settings[0].settings)
    labels = short_names(fields)
    table = Table(title=escape(title), title_justify="left")
    for field in fields:
        table.add_column(labels[field])
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
            f"{each.seconds:.0f}" if math.isfinite(each.seconds) else "-",
        )
    (console or Console()).print(table)


def _run_as_dict(run: SweepRun, result: RunResult) -> dict[str, Any]:
    return {"name": run.name, "seed": run.experiment.seed, **dataclasses.asdict(result)}


LOG_RATIO = 2.5
"""Ratio of the largest to the smallest value from which the axis of a field is logarithmic."""

MAX_LEGEND_ENTRIES = 12


def plot_sweep(summary: SweepSummary, path: AnyPath) -> bool:
    """Draw the mean over seeds with its standard deviation, and every run as a point.

    The horizontal axis has the numeric field of the most values, or else the settings as
    categories.

    Returns:
      True if the figure was drawn; False if no run finished.

    Raises:
      UserError: The file cannot be written.
    """
    settings_drawn = [each for each in summary.settings if each.values]
    if not settings_drawn:
        return False
    from matplotlib.figure import Figure  # importing it takes half a second

    figure = Figure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    field = main_field(settings_drawn)
    if field is None:
        _draw_categories(axes, settings_drawn)
    else:
        _draw_lines(axes, settings_drawn, field)
    arrow = "lower" if summary.lower_is_better else "higher"
    axes.set_ylabel(f"held-out {summary.metric.replace('_', ' ')} ({arrow} is better)")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())
    return True


def main_field(settings: Sequence[SettingSummary]) -> str | None:
    """Return the numeric field with the most values; None without a numeric field that varies."""
    counts = {}
    for field in settings[0].settings:
        texts = {each.settings[field] for each in settings}
        if len(texts) > 1 and all(map(_is_number, texts)):
            counts[field] = len(texts)
    return max(counts, key=lambda field: counts[field]) if counts else None


def _draw_lines(axes: Axes, settings: Sequence[SettingSummary], field: str) -> None:
    labels = short_names(list(settings[0].settings))
    lines: dict[str, list[SettingSummary]] = {}
    for each in settings:
        others = [
            f"{labels[name]}={value}" for name, value in each.settings.items() if name != field
        ]
        lines.setdefault(_plain(", ".join(others)), []).append(each)
    for number, (label, group) in enumerate(sorted(lines.items())):
        group.sort(key=lambda each: float(each.settings[field]))
        x = np.array([float(each.settings[field]) for each in group])
        _draw_group(axes, x, group, color=f"C{number % 10}", line="o-", label=label or None)
    x = np.array([float(each.settings[field]) for each in settings])
    if x.min() > 0 and x.max() / x.min() >= LOG_RATIO:
        axes.set_xscale("log")
    axes.set_xlabel(labels[field].replace("_", " "))
    if 1 < len(lines) <= MAX_LEGEND_ENTRIES:
        axes.legend(frameon=False, fontsize="small")


def _draw_categories(axes: Axes, settings: Sequence[SettingSummary]) -> None:
    _draw_group(axes, np.arange(len(settings)), settings, color="C0", line="o", label=None)
    names = [_plain("\n".join(each.settings.values())) or "all" for each in settings]
    axes.set_xticks(range(len(settings)), names, fontsize="small")
    axes.set_xlim(-0.5, len(settings) - 0.5)
    axes.set_xlabel(", ".join(short_names(list(settings[0].settings)).values()) or "setting")


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formulas."""
    return text.replace("$", r"\$")


def _draw_group(
    axes: Axes,
    x: np.ndarray,  # [settings]
    settings: Sequence[SettingSummary],
    *,
    color: str,
    line: str,
    label: str | None,
) -> None:
    means = [each.mean for each in settings]
    deviations = [each.deviation if math.isfinite(each.deviation) else 0.0 for each in settings]
    axes.errorbar(x, means, deviations, fmt=line, color=color, ms=4, capsize=3, label=label)
    points = [(at, value) for at, each in zip(x, settings, strict=True) for value in each.values]
    at, values = zip(*points, strict=True)
    axes.scatter(at, values, s=9, color=color, alpha=0.5)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False

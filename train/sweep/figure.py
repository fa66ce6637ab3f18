"""Figure of a sweep: the metric over one swept field, a line for each value of the others."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from train.data.files import AnyPath
from train.run_folder.writing import write_atomically
from train.sweep.grid import short_names
from train.sweep.summary import SettingSummary, SweepSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    drawn = [each for each in summary.settings if each.values]
    if not drawn:
        return False
    from matplotlib.figure import Figure  # importing it takes half a second

    figure = Figure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    field = main_field(drawn)
    if field is None:
        _draw_categories(axes, drawn)
    else:
        _draw_lines(axes, drawn, field)
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
        lines.setdefault(", ".join(others), []).append(each)
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
    names = ["\n".join(each.settings.values()) or "all" for each in settings]
    axes.set_xticks(range(len(settings)), names, fontsize="small")
    axes.set_xlim(-0.5, len(settings) - 0.5)
    axes.set_xlabel(", ".join(short_names(list(settings[0].settings)).values()) or "setting")


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

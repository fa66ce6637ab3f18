"""Draw loss.png: training and validation loss by step, validation scores, and events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.figures import BLACK, BLUE, GREY, ORANGE, figure_style, png
from train.files import AnyPath
from train.runtime.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SCORES = ("accuracy", "f1", "bleu")
"""Metrics that rise with quality. Those that a run has are drawn below its losses."""

_MARKS = {"skipped": "|", "rolled back": "<"}
"""Marker of each event of the event log that the plot shows."""

_MIN_SMOOTHED_LINES = 50
# Half width of the smoothing window: the index over the first, at most the length over the second.
_WINDOW_GROWTH = 10
_WINDOW_LIMIT = 40

# Ratio of the largest to the smallest value from which an axis is logarithmic.
_LOG_STEP_RATIO = 1_000
_LOG_LOSS_RATIO = 3


def plot_losses(
    metrics: Sequence[Mapping[str, Any]],
    path: AnyPath,
    references: Mapping[str, float] | None = None,
    events: Mapping[str, Sequence[int]] | None = None,
) -> bool:
    """Draw training and validation losses by step, and validation scores below them.

    Args:
      metrics: Lines of a metrics.jsonl, from `train.telemetry.metrics_log.read_metrics`.
      path: PNG file to write.
      references: Losses to compare with, in nats a token, by name; each is a horizontal line.
      events: Steps by event name, from `event_steps`; each is a mark.

    Returns:
      True if the plot was drawn; False if there is no finite loss yet.

    Raises:
      UserError: The file cannot be written.
    """
    figure = draw_losses(metrics, references, events)
    if figure is None:
        return False
    write_atomically(path, png(figure))
    return True


@figure_style()
def draw_losses(
    metrics: Sequence[Mapping[str, Any]],
    references: Mapping[str, float] | None = None,
    events: Mapping[str, Sequence[int]] | None = None,
) -> Figure | None:
    """Return the figure that `plot_losses` writes, or None if there is no finite loss yet."""
    training = _points(metrics, "train", "loss")
    validation = _points(metrics, "validation", "loss")
    scores = {name: _points(metrics, "validation", name) for name in _SCORES}
    scores = {name: points for name, points in scores.items() if points.size}
    losses = np.concatenate([training, validation], axis=1)
    if not losses.size:
        return None
    figure = _notebook_figure(figsize=(8, 5 + 2 * len(scores)))
    heights = [5, *[2] * len(scores)]
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    axes, *score_axes = panels
    _draw_training(axes, *training)
    if validation.size:
        steps, values = validation
        label, best = f"validation: {values[-1]:.3f}", values.argmin()
        if values[best] < values[-1]:
            label += f", at best {values[best]:.3f} (step {steps[best]:,.0f})"
        axes.plot(steps, values, "o-", color=ORANGE, markersize=4, linewidth=1, label=label)
    _draw_references(axes, references or {})
    _draw_event_marks(axes, events or {})
    _scale_axes(axes, *losses)
    axes.set_ylabel("loss (nats)")
    for panel, (name, (steps, values)) in zip(score_axes, scores.items(), strict=True):
        label = f"validation: {values[-1]:.3f}"
        panel.plot(steps, values, "o-", color=ORANGE, markersize=4, linewidth=1, label=label)
        panel.set_ylabel(name)
    for panel in panels:
        panel.legend()
    panels[-1].set_xlabel("step")
    figure.align_ylabels()
    return figure


def _notebook_figure(**options: Any) -> Figure:
    """Return a figure that a notebook shows: others are text there until pyplot has drawn one."""
    from matplotlib.figure import Figure  # importing it takes half a second

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:  # a hook of IPython
            return png(self)

    return NotebookFigure(**options)


def _points(metrics: Sequence[Mapping[str, Any]], split: str, name: str) -> np.ndarray:
    """Return the finite values of a metric as [2, N]: steps and values, sorted by step."""
    points = {
        # Of several evaluations of one step, the last is the run's.
        line["step"]: line[name]
        for line in metrics
        if line["split"] == split and name in line and math.isfinite(line[name])
    }
    return np.array(sorted(points.items()), float).reshape(-1, 2).T


def _draw_training(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    if len(losses) < _MIN_SMOOTHED_LINES:
        axes.plot(steps, losses, ".-", color=BLUE, linewidth=1.5, label="training")
        return
    axes.plot(steps, losses, "-", color=BLUE, linewidth=0.8, alpha=0.3)
    smooth = _smoothed(losses)
    axes.plot(steps, smooth, "-", color=BLUE, linewidth=1.8, label="training, smoothed")


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return each value's mean with its neighbours, as many on both sides as there are.

    The window grows with the distance from the start, where the curve is steep, up to a fraction
    of the whole. The smoothed curve so follows the loss on a logarithmic axis too.
    """
    index = np.arange(len(values))
    reach = np.minimum(index // _WINDOW_GROWTH, len(values) // _WINDOW_LIMIT)
    above = np.minimum(index + reach + 1, len(values))
    below = index - reach
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[above] - sums[below]) / (above - below)


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    # The lowest label is below its line: two compressors may be too close for both above.
    lowest = min(references.values()) if len(references) > 1 else None
    for name, loss in references.items():
        below = loss == lowest
        axes.axhline(loss, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"{name}: {loss:.3f}",
            (1, loss),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),  # beside the axes, where no curve is
            textcoords="offset points",
            verticalalignment="top" if below else "bottom",
            color=GREY,
            fontsize="small",
        )


def event_steps(events: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the steps of the events that the plot shows, by event, for `plot_losses`."""
    steps: dict[str, list[int]] = {}
    for line in events:
        if line.get("event") in _MARKS:
            steps.setdefault(line["event"], []).append(line["step"])
    return steps


def _draw_event_marks(axes: Axes, events: Mapping[str, Sequence[int]]) -> None:
    """Draw marks along the lower edge, so that they do not depend on the losses."""
    for name, steps in events.items():
        axes.plot(
            sorted(set(steps)),
            [0] * len(set(steps)),
            _MARKS[name],
            color=BLACK,
            markersize=7,
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label=name,
        )


def _scale_axes(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    """Set logarithmic axes where linear ones would squeeze most of the curve into a corner."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    positive = steps[steps > 0]
    if positive.size and positive.max() >= _LOG_STEP_RATIO * positive.min():
        axes.set_xscale("symlog" if (steps <= 0).any() else "log")
    if losses.min() > 0 and losses.max() >= _LOG_LOSS_RATIO * losses.min():
        axes.set_yscale("log")
        # As many labels a decade as do not overlap.
        decades = math.log10(losses.max() / losses.min())
        subs = (1, 1.5, 2, 3, 4, 5, 7) if decades < 3 else (1, 3) if decades < 6 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())

"""loss.png: the loss of a run as it went down, and what else its task is judged by."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.files import AnyPath
from train.run_folder.folder import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the palette of Okabe and Ito, which people with any colour vision can tell apart.
_BLUE, _ORANGE, _GREY, _BLACK = "#0072B2", "#D55E00", "#666666", "#000000"


_SCORES = ("accuracy", "f1", "bleu")
"""Of the metrics, those that rise; each that a run has is drawn below its losses."""


_MARKS = {"skipped": "|", "rolled back": "<"}
"""Of the events of a logbook those that are shown, and how."""


_SMOOTHED_FROM = 50  # lines; fewer are shown as they are


_WINDOW_GROWS = 10


_WINDOW_WHOLE = 40


# The largest over the smallest, from which an axis is logarithmic.
_LOG_STEPS = 1_000


_LOG_LOSSES = 3


def plot_losses(
    metrics: Sequence[Mapping[str, Any]],
    path: AnyPath,
    references: Mapping[str, float] | None = None,
    events: Mapping[str, Sequence[int]] | None = None,
) -> bool:
    """Draws the losses of training and validation against the step, and validation scores.

    Args:
      metrics: Lines of a metrics.jsonl, as `train.telemetry.metrics_log.read_metrics` gives them.
      path: Where the PNG goes.
      references: Losses to compare with, nats a token, by name; a line each.
      events: Steps at which something happened, by what it was; a mark each.

    Returns:
      Whether it was drawn: not if there is no finite loss yet.

    Raises:
      UserError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # takes half a second

    training = _points(metrics, "train", "loss")
    validation = _points(metrics, "validation", "loss")
    scores = {name: _points(metrics, "validation", name) for name in _SCORES}
    scores = {name: points for name, points in scores.items() if points.size}
    drawn = np.concatenate([training, validation], axis=1)
    if not drawn.size:
        return False
    figure = Figure(figsize=(8, 5 + 2 * len(scores)), dpi=120, layout="constrained")
    heights = [5, *[2] * len(scores)]
    grid = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
    axes, *below = grid[:, 0]
    _draw_training(axes, *training)
    _draw_validation(axes, *validation)
    _draw_references(axes, references or {})
    _draw_events(axes, events or {})
    _scale(axes, *drawn)
    for each, (name, points) in zip(below, scores.items(), strict=True):
        _draw_score(each, name, *points)
    grid[-1, 0].set_xlabel("step")
    figure.align_ylabels()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())
    return True


def _points(metrics: Sequence[Mapping[str, Any]], split: str, name: str) -> np.ndarray:
    """The finite values of a metric. Returns [2, N]: steps and values, in order of steps."""
    points = sorted(
        (line["step"], line[name])
        for line in metrics
        if line["split"] == split and name in line and math.isfinite(line[name])
    )
    return np.array(points, float).reshape(-1, 2).T


def _draw_training(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    if len(losses) < _SMOOTHED_FROM:
        axes.plot(steps, losses, ".-", color=_BLUE, linewidth=1.5, label="training")
        return
    axes.plot(steps, losses, color=_BLUE, linewidth=0.8, alpha=0.3)
    axes.plot(steps, _smoothed(losses), color=_BLUE, linewidth=1.8, label="training, smoothed")


def _smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours, as many on both sides as there are.

    The window grows with the distance from the start, where the curve is steep, and no further
    than a part of the whole: so it follows the curve, on a logarithmic axis too.
    """
    index = np.arange(len(values))
    reach = np.minimum(index // _WINDOW_GROWS, len(values) // _WINDOW_WHOLE)
    above = np.minimum(index + reach + 1, len(values))
    below = index - reach
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[above] - sums[below]) / (above - below)


def _draw_validation(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    if not steps.size:
        return
    label = f"validation: {losses[-1]:.3f}"
    best = losses.argmin()
    if losses[best] < losses[-1]:
        label += f", at best {losses[best]:.3f} (step {steps[best]:,.0f})"
    axes.plot(steps, losses, "o-", color=_ORANGE, markersize=4, linewidth=1, label=label)


def _draw_score(axes: Axes, name: str, steps: np.ndarray, values: np.ndarray) -> None:
    label = f"validation: {values[-1]:.3f}"
    axes.plot(steps, values, "o-", color=_ORANGE, markersize=4, linewidth=1, label=label)
    axes.set_ylabel(name)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _draw_references(axes: Axes, references: Mapping[str, float]) -> None:
    for name, loss in references.items():
        axes.axhline(loss, color=_GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"{name}: {loss:.3f}",
            (1, loss),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color=_GREY,
            fontsize="small",
        )


def event_steps(events: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The events of a logbook that the curve shows, as `plot_losses` takes them."""
    steps: dict[str, list[int]] = {}
    for line in events:
        if line.get("event") in _MARKS:
            steps.setdefault(line["event"], []).append(line["step"])
    return steps


def _draw_events(axes: Axes, events: Mapping[str, Sequence[int]]) -> None:
    """Along the lower edge, whatever the losses are."""
    for name, steps in events.items():
        axes.plot(
            sorted(set(steps)),
            [0] * len(set(steps)),
            _MARKS[name],
            color=_BLACK,
            markersize=7,
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label=name,
        )


def _scale(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    """Logarithmic axes where plain ones would press what matters into a corner."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    positive = steps[steps > 0]
    if positive.size and positive.max() >= _LOG_STEPS * positive.min():
        axes.set_xscale("symlog" if (steps <= 0).any() else "log")
    if losses.min() > 0 and losses.max() >= _LOG_LOSSES * losses.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("loss (nats)")
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

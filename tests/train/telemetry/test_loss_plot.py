import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from train.errors import UserError
from train.telemetry.loss_plot import (
    _points,
    _scale_axes,
    _smoothed,
    draw_losses,
    event_steps,
    plot_losses,
)

RENDERS_PLOTS = True

TRAINING: list[dict[str, Any]] = [
    {"step": step, "split": "train", "loss": 9 / step + 2} for step in range(1, 101)
]
VALIDATION: list[dict[str, Any]] = [
    {"step": step, "split": "validation", "loss": 9 / step + 3, "accuracy": 0.5, "f1": 0.25}
    for step in (50, 100)
]


def points(line: Line2D) -> list[list[float]]:
    coordinates: list[list[float]] = np.asarray(line.get_xydata()).tolist()
    return coordinates


def test_figure_has_losses_scores_references_and_events(tmp_path: Path) -> None:
    logbook: list[dict[str, Any]] = [
        {"event": "started", "step": 0},
        {"event": "skipped", "step": 40, "reason": "loss 9, more than 3"},
        {"event": "skipped", "step": 41},
        {"event": "rolled back", "step": 41, "checkpoint": 20},
        {"event": "skipped", "step": 40},
    ]
    events = event_steps(logbook)
    assert events == {"skipped": [40, 41, 40], "rolled back": [41]}
    figure = draw_losses(TRAINING + VALIDATION, {"gzip -9": 3.9}, events)
    assert figure is not None
    losses, accuracy, f1 = figure.axes
    raw, smooth, validation, reference, skipped, back = map(points, losses.lines)
    assert raw[2] == [3, 5]
    assert smooth[50] == [51, _smoothed(9 / np.arange(1, 101.0) + 2)[50]]
    assert validation == [[50, 3.18], [100, 3.09]]
    assert {loss for _, loss in reference} == {3.9}
    assert [step for step, _ in skipped] == [40, 41]
    assert [step for step, _ in back] == [41]
    assert points(accuracy.lines[0]) == [[50, 0.5], [100, 0.5]]
    assert points(f1.lines[0]) == [[50, 0.25], [100, 0.25]]
    path = tmp_path / "loss.png"
    assert plot_losses(TRAINING + VALIDATION, path, {"gzip -9": 3.9}, events)
    assert imread(path).shape == (720 + 2 * 288, 1152, 4)
    assert [each.name for each in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize(
    "metrics",
    [
        [{"step": 1, "split": "train", "loss": 2.0}],
        [{"step": 0, "split": "validation", "loss": 9.0}, *TRAINING],
        [{"step": step * 1000, "split": "train", "loss": 1e-9 * step} for step in range(2000)],
        [{"step": step, "split": "train", "loss": -step} for step in range(200)],
        [{"step": 5, "split": "train", "loss": math.inf}, *TRAINING],
        [{"step": 5, "split": "train", "grad_norm": 1.0}, *VALIDATION],
    ],
    ids=["one point", "step 0", "many decades", "negative", "infinite", "validation alone"],
)
def test_unusual_curves_cause_no_warnings(metrics: list[dict[str, Any]]) -> None:
    figure = draw_losses(metrics)
    assert figure is not None
    figure.draw_without_rendering()


def test_no_plot_without_losses(tmp_path: Path) -> None:
    assert not plot_losses([], tmp_path / "loss.png")
    assert not plot_losses([{"step": 1, "split": "train", "loss": math.nan}], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
    with pytest.raises(UserError, match="cannot be written"):
        plot_losses(TRAINING, tmp_path / "gone" / "loss.png")


def test_losses_are_sorted_by_step_and_finite() -> None:
    metrics = [
        {"step": 3, "split": "train", "loss": 2.0},
        {"step": 1, "split": "train", "loss": 5.0},
        {"step": 2, "split": "train", "loss": math.nan},
        {"step": 2, "split": "test", "loss": 7.0},
    ]
    np.testing.assert_array_equal(_points(metrics, "train", "loss"), [[1, 3], [5, 2]])
    assert _points(metrics, "validation", "loss").shape == (2, 0)
    # The last evaluation of a step is the run's, whether better or worse.
    twice = [{"step": 9, "split": "validation", "loss": loss} for loss in (6.9, 5.2, 6.0)]
    np.testing.assert_array_equal(_points(twice, "validation", "loss"), [[9], [6.0]])


@pytest.mark.parametrize("exponent", [1, 4, 12])
def test_losses_of_many_decades_have_a_few_labels(exponent: int) -> None:
    axes = Figure(figsize=(7, 4)).subplots()
    losses = np.array([2.0, 2 * 10.0**exponent, 30.0])
    axes.plot([1, 2, 3], losses, label="training")
    _scale_axes(axes, np.array([1, 2, 3]), losses)
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 20


@pytest.mark.parametrize(
    ("steps", "losses", "scales"),
    [
        ([1, 999], [1.0, 2.9], ("linear", "linear")),
        ([1, 1000], [1.0, 3.0], ("log", "log")),
        ([0, 1, 1000], [-1.0, 1.0, 3.0], ("symlog", "linear")),
    ],
)
def test_wide_ranges_are_logarithmic(
    steps: list[int], losses: list[float], scales: tuple[str, str]
) -> None:
    axes = Figure().subplots()
    axes.plot(steps, losses, label="training")
    _scale_axes(axes, np.array(steps), np.array(losses))
    assert (axes.get_xscale(), axes.get_yscale()) == scales


def test_smoothing_is_a_mean_with_a_growing_window() -> None:
    values = np.arange(400.0) ** 2
    smoothed = _smoothed(values)
    np.testing.assert_array_equal(smoothed[:10], values[:10])
    assert smoothed[10] == (9**2 + 10**2 + 11**2) / 3
    assert smoothed[200] == values[190:211].mean()
    assert smoothed[399] == values[389:].mean()


def test_labels_of_close_references_do_not_overlap() -> None:
    figure = draw_losses(TRAINING, {"gzip": 2.92, "xz": 2.91, "zstd": 5.0})
    assert figure is not None
    figure.draw_without_rendering()
    texts = {text.get_text()[:2]: text.get_window_extent() for text in figure.axes[0].texts}
    assert texts["gz"].y0 > texts["xz"].y1
    assert texts["zs"].y0 > texts["gz"].y1


def test_notebook_shows_the_figure_without_pyplot() -> None:
    """IPython draws a plain figure as text until pyplot has loaded the notebook's backend."""
    code = """
from IPython.core.formatters import DisplayFormatter
from train.telemetry.loss_plot import draw_losses
import sys
figure = draw_losses([{"step": step, "split": "train", "loss": 1 / step} for step in (1, 2)])
assert "matplotlib.pyplot" not in sys.modules
formats, _ = DisplayFormatter().format(figure)
assert formats["image/png"].startswith(bytes([137]) + b"PNG"), formats
"""
    subprocess.run([sys.executable, "-c", code], check=True)

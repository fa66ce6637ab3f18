import math
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from train.errors import UserError
from train.telemetry.loss_plot import (
    _points,
    _scale_axes,
    _smoothed,
    draw_losses,
    event_steps,
    plot_losses,
)

TRAINING: list[dict[str, Any]] = [
    {"step": step, "split": "train", "loss": 9 / step + 2} for step in range(1, 101)
]
VALIDATION: list[dict[str, Any]] = [
    {"step": step, "split": "validation", "loss": 9 / step + 3} for step in (50, 100)
]


def pixels(path: pathlib.Path) -> np.ndarray:
    """Return the image in a PNG, [height, width, 4]."""
    from matplotlib.image import imread

    return np.asarray(imread(path))


def has_colour(image: np.ndarray, colour: str) -> bool:
    expected = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((np.abs(image[..., :3] - expected).max(-1) < 1 / 255).any())


def test_plot_is_a_png_with_both_splits_and_baselines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "loss.png"
    assert plot_losses(TRAINING + VALIDATION, path, {"gzip -9": 3.9})
    both = pixels(path)
    assert both.shape == (600, 960, 4)
    assert plot_losses(TRAINING, path)
    training = pixels(path)
    assert [has_colour(image, "#0072B2") for image in (both, training)] == [True, True]
    assert [has_colour(image, "#D55E00") for image in (both, training)] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_each_score_has_its_own_panel(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "loss.png"
    scored = [{**line, "accuracy": 0.5, "f1": 0.25} for line in VALIDATION]
    assert plot_losses(TRAINING + scored, path)
    image = pixels(path)
    assert image.shape == (600 + 2 * 240, 960, 4)
    assert [has_colour(part, "#D55E00") for part in np.array_split(image, [600, 840])] == [True] * 3


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
def test_unusual_curves_cause_no_warnings(
    metrics: list[dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    assert plot_losses(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_no_plot_without_losses(tmp_path: pathlib.Path) -> None:
    assert not plot_losses([], tmp_path / "loss.png")
    nothing = [{"step": 1, "split": "train", "loss": math.nan}]
    assert not plot_losses(nothing, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_unwritable_plot_is_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"loss\.png: cannot be written \(No such file"):
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
    np.testing.assert_array_equal(_points(twice, "validation", "loss")[1], [6.9, 5.2, 6.0])


@pytest.mark.parametrize("exponent", [1, 4, 5, 12, 20])
def test_losses_of_many_decades_have_a_few_labels(exponent: int) -> None:
    axes = Figure(figsize=(7, 4)).subplots()
    losses = np.array([2.0, 2 * 10.0**exponent, 30.0])
    axes.plot([1, 2, 3], losses, label="training")
    _scale_axes(axes, np.array([1, 2, 3]), losses)
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 20


def test_smoothing_is_a_mean_with_a_growing_window() -> None:
    values = np.arange(400.0) ** 2
    smoothed = _smoothed(values)
    np.testing.assert_array_equal(smoothed[:10], values[:10])
    assert smoothed[10] == (9**2 + 10**2 + 11**2) / 3
    assert smoothed[200] == values[190:211].mean()
    assert smoothed[399] == values[389:].mean()


def test_logged_events_are_marked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "loss.png"
    logbook: list[dict[str, Any]] = [
        {"event": "started", "step": 0},
        {"event": "skipped", "step": 40, "reason": "loss 9, more than 3"},
        {"event": "skipped", "step": 41},
        {"event": "rolled back", "step": 41, "checkpoint": 20},
        {"event": "skipped", "step": 40},
    ]
    events = event_steps(logbook)
    assert events == {"skipped": [40, 41, 40], "rolled back": [41]}
    assert plot_losses(TRAINING, path)
    without = pixels(path)
    assert plot_losses(TRAINING, path, None, events)
    changed = (pixels(path) != without).any(-1)
    assert changed[500:, 300:500].any()  # below, near step 40 of 100
    assert not changed[500:, 700:].any()


def test_labels_of_close_references_do_not_overlap() -> None:
    figure = draw_losses(TRAINING + VALIDATION, {"gzip": 2.92, "xz": 2.91, "zstd": 5.0})
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

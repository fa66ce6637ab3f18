"""Figures of the documentation: diagrams, textbook pictures, and traces of training steps."""

import dataclasses
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import train
from bench.drills.faults import Fault, planted
from bench.drills.spikes import decoder
from bench.results import FIGURES, save_figure
from train import loop
from train.config.experiment_files import find_experiment
from train.experiment import EvaluationConfig, Experiment, SampleConfig
from train.figures import BLUE, COLORS, GREEN, ORANGE
from train.optim.schedules import ScheduleConfig, Shape
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.layers.activations import ACTIVATIONS, swish

# ---- Masks and diagrams ----

LIGHT_BLUE, LIGHT_ORANGE, LIGHT_GREEN, LIGHT_GREY = "#c6dbef", "#fdd0a2", "#c7e9c0", "#eeeeee"


def draw_masks() -> Figure:
    """Draw masks as `dense_mask` expands them."""
    length = 16
    causal = MaskPattern(causal=True)
    documents = jnp.array([[1] * 6 + [2] * 7 + [0] * 3])
    prefix = Mask(MaskPattern(causal=True, prefix=True), prefix_lengths=jnp.array([5]))
    cases = {
        "causal": Mask(causal),
        "bidirectional, padded": Mask(key_lengths=jnp.array([12])),
        "window of 4": Mask(MaskPattern(causal=True, window=4)),
        "window of 4, dilation 2": Mask(MaskPattern(causal=True, window=4, dilation=2)),
        "prefix of 5": prefix,
        "two documents, padding": Mask(causal, segments=documents),
    }
    figure = Figure(figsize=(8, 5.8))
    for axes, (title, mask) in zip(figure.subplots(2, 3).flat, cases.items(), strict=True):
        axes.imshow(dense_mask(mask, length, length)[0], vmin=0, vmax=1.3)
        axes.set(title=title, xticks=[0, length - 1], yticks=[0, length - 1])
        axes.set(xlabel="key", ylabel="query")
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, color="#aab1bc")
    return figure


def draw_attention_steps() -> Figure:
    """Draw scores, masked scores and weights of one head over random vectors."""
    length, width = 10, 16
    q, k = (jax.random.normal(jax.random.key(seed), (1, length, 1, width)) for seed in (1, 4))
    scores = np.asarray(jnp.einsum("BTNH,BSNH->BNTS", q, k)[0, 0]) / np.sqrt(width)
    mask = Mask(MaskPattern(causal=True))
    visible = np.asarray(dense_mask(mask, length, length)[0])
    scores_of, outputs = ScoreSpec(1 / np.sqrt(width)), frozenset({"weights"})
    _, aux = attend(q, k, k, mask, scores_of, hardware=Hardware(), outputs=outputs)
    weights = np.asarray(aux["weights"])[0, 0]
    panels = {
        "scores q kᵀ / √H": (scores, "RdBu", -3, 3),
        "scores, masked": (np.where(visible, scores, np.nan), "RdBu", -3, 3),
        "weights (softmax)": (np.where(visible, weights, np.nan), "Blues", 0, 1),
    }
    figure = Figure(figsize=(9, 3.2))
    for axes, (title, panel) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        values, colours, low, high = panel
        drawn = axes.imshow(values, cmap=colours, vmin=low, vmax=high)
        axes.set_facecolor("#d9d9d9")  # hidden pairs
        axes.set(title=title, xlabel="key", ylabel="query", xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.spines[:].set(visible=True, color="#aab1bc")
        figure.colorbar(drawn, ax=axes, shrink=0.8)
    return figure


def draw_model() -> Figure:
    """Draw the parts of a decoder with the shapes between them."""
    figure, axes = _blank(7.2, 6.6)
    stream = 1.5
    stem = {"arrowstyle": "-|>", "lw": 2.5}
    axes.annotate("", (stream, 6.2), (stream, 0.75), arrowprops=stem, zorder=0)
    _box(axes, 0.3, 0.2, 2.4, 0.5, "token ids  [B, T]", LIGHT_GREY)
    _box(axes, 0.3, 0.95, 2.4, 0.5, "embedding", LIGHT_GREEN)
    for y, text, color in (
        (2.0, "norm → attention", LIGHT_BLUE),
        (3.2, "norm → feed-forward", LIGHT_ORANGE),
    ):
        _box(axes, 3.6, y, 2.5, 0.6, text, color)
        arrow = {"arrowstyle": "-|>", "lw": 1.3, "color": "#444444"}
        axes.annotate("", (3.6, y + 0.12), (stream, y + 0.12), arrowprops=arrow)
        axes.annotate("", (stream, y + 0.5), (3.6, y + 0.5), arrowprops=arrow)
        axes.text(stream + 0.12, y + 0.57, "+", fontsize=13, weight="bold")
    layer = FancyBboxPatch((1.1, 1.75), 6.5, 2.3, boxstyle="round,pad=0.05", fill=False, ls="--")
    axes.add_patch(layer)
    axes.text(7.5, 1.8, "one layer, L times", ha="right")
    _box(axes, 0.3, 4.5, 2.4, 0.5, "final norm", LIGHT_GREY)
    _box(axes, 0.3, 5.3, 2.4, 0.5, "output matrix", LIGHT_GREEN)
    axes.text(stream, 6.3, "logits  [B, T, V]", ha="center")
    for y in (1.55, 4.2):
        axes.text(stream - 0.1, y, "[B, T, D]", ha="right", fontsize=10)
    axes.text(6.3, 2.3, "q [B,T,N,H]\nk, v [B,S,K,H]", fontsize=9.5, va="center")
    axes.text(6.3, 3.5, "[B, T, F]", fontsize=9.5, va="center")
    axes.set(xlim=(0, 7.8), ylim=(0, 6.6))
    return figure


def draw_stacked_layers() -> Figure:
    """Draw five layers of a pattern of two places, and where their weights are stored."""
    figure, axes = _blank(7.4, 3.1)
    colors = (LIGHT_BLUE, LIGHT_ORANGE)
    for layer in range(5):
        x = 0.2 + 1.45 * layer
        text = f"layer {layer}\nplace {layer % 2}, rep. {layer // 2}"
        _box(axes, x, 2.1, 1.3, 0.7, text, colors[layer % 2], size=9.5)
    for place, (y, count) in enumerate(((1.1, 3), (0.3, 2))):
        axes.text(0.2, y + 0.25, f"place_{place}  [{count}, D, N, H]", va="center")
        for index in range(count):
            label = f"layer {place + 2 * index}"
            _box(axes, 3.1 + 1.25 * index, y, 1.15, 0.5, label, colors[place])
    axes.set(xlim=(0, 7.5), ylim=(0.1, 3))
    return figure


def draw_exact_resume() -> Figure:
    """Draw an uninterrupted run above a killed one, and the contents of its checkpoint."""
    figure, axes = _blank(8, 3.4)
    red = "#b30000"
    for y, title in ((2.6, "never stopped"), (1.6, "killed at step 6")):
        axes.text(0.1, y + 0.2, title, va="center")
        for step in range(1, 9 if y > 2 else 7):
            lost = y < 2 and step > 4
            color = LIGHT_GREY if lost else LIGHT_BLUE
            _box(axes, 1.9 + 0.72 * (step - 1), y, 0.62, 0.4, str(step), color)
    for step in (5, 6, 7, 8):
        _box(axes, 1.9 + 0.72 * (step - 1), 1.02, 0.62, 0.4, str(step), LIGHT_BLUE)
    arrow = {"arrowstyle": "-|>", "lw": 1.4, "color": red}
    axes.annotate("", (4.72, 1.22), (4.45, 1.6), arrowprops=arrow)
    axes.text(4.25, 1.2, "resumes from checkpoint 4", va="center", ha="right", color=red)
    text = "checkpoint 4:  weights · moments · loss scale · anomaly history · seed · data cursor"
    _box(axes, 0.1, 0.15, 7.6, 0.5, text, LIGHT_GREEN, size=10)
    axes.set(xlim=(0, 7.8), ylim=(0, 3.2))
    return figure


def _blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.subplots()
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    color: str,
    size: float = 11.0,
) -> None:
    """Draw a rounded box with a text in its middle."""
    style = "round,pad=0.02,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="#555555")
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


# ---- Textbook pictures, drawn from this code ----


def activation_curves(x: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:  # x: [n]
    """Return values and derivatives of every activation at x."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        name: function for name, function in ACTIVATIONS.items() if name != "gelu_tanh"
    }
    functions["swish, β = 4"] = lambda value: swish(value, 4.0)
    points = jnp.asarray(x, jnp.float32)
    return {
        name: (np.asarray(function(points)), np.asarray(jax.vmap(jax.grad(function))(points)))
        for name, function in functions.items()
    }


def draw_activations() -> Figure:
    """Draw the activations of feed-forward layers, and their derivatives."""
    x = np.linspace(-4, 3, 501)
    figure = Figure(figsize=(9, 4))
    panels = figure.subplots(1, 2)
    for name, curves in activation_curves(x).items():
        for axes, curve in zip(panels, curves, strict=True):
            axes.plot(x, curve, label=name)
    panels[0].set(title="activation", xlabel="x", ylabel="f(x)", ylim=(-0.5, 4))
    panels[1].set(title="derivative", xlabel="x", ylabel="f '(x)", ylim=(-0.5, 3))
    panels[0].legend(loc="upper left")
    return figure


def draw_learning_rates() -> Figure:
    """Draw the learning rate over a run, by shape of the schedule, all with a peak of 1e-3."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    steps = 1000
    updates = jnp.arange(1, steps + 1)
    for shape in get_args(Shape):
        schedule = ScheduleConfig(shape, 1e-3, steps // 10).make(steps=steps, width=512)
        axes.plot(updates, np.asarray(jax.vmap(schedule)(updates)), label=shape)
    axes.set(xlabel="update", ylabel="learning rate", title="warm-up of 100 updates, 1,000 in all")
    axes.legend(loc="lower left", bbox_to_anchor=(0.1, 0))
    return figure


FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def largest_errors(exponents: np.ndarray) -> dict[str, np.ndarray]:  # [n] each
    """Return the largest relative error of rounding numbers between 2^e and 2^(e + 1), by format.

    Infinity: numbers overflow.
    """
    x = 2.0 ** (exponents[:, None] + np.linspace(0, 1, 64, endpoint=False))
    errors = {}
    for name in FORMATS:
        with np.errstate(over="ignore"):
            rounded = x.astype(jnp.dtype(name)).astype(np.float64)
        found = np.where(np.isfinite(rounded), np.abs(rounded - x) / x, np.inf)
        errors[name] = found.max(axis=1)
    return errors


def draw_float_formats() -> Figure:
    """Draw the bits of each format, and its largest rounding error over the size of numbers."""
    figure = Figure(figsize=(9, 4.2))
    bits, error = figure.subplots(1, 2, width_ratios=(1, 1.3))
    kinds = {"sign": ORANGE, "exponent": BLUE, "fraction": GREEN}
    for row, name in enumerate(FORMATS):
        info, left = jnp.finfo(name), 0
        for kind, width in zip(kinds, (1, info.nexp, info.nmant), strict=True):
            label = kind if row == 0 else None
            bits.barh(row, width, left=left, color=kinds[kind], edgecolor="white", label=label)
            middle = {"ha": "center", "va": "center", "color": "white", "fontsize": 9}
            bits.text(left + width / 2, row, str(width), **middle)
            left += width
    bits.set(xlabel="bits", yticks=range(len(FORMATS)), yticklabels=FORMATS)
    bits.grid(visible=False)
    bits.invert_yaxis()
    bits.legend(loc="lower right")
    exponents = np.arange(-40, 41)
    for name, largest in largest_errors(exponents).items():
        error.loglog(2.0**exponents, np.where(np.isfinite(largest), largest, np.nan), label=name)
    error.set(xlabel="size of a number", ylabel="largest relative error of rounding")
    error.set(title="1: rounded to zero. A curve ends at overflow", ylim=(3e-11, 3))
    error.legend(loc="lower center", ncols=2)
    return figure


def spike_run(folder: Path, factor: float) -> list[dict[str, Any]]:
    """Train a small run with five bad batches in its middle; return its steps in their order.

    Steps that were skipped have the key `reason`; `factor` 1 leaves the run untouched.
    """
    experiment = dataclasses.replace(decoder(folder, 150), log_every=1)
    workdir = folder / "run"
    with planted(Fault(75, count=5, factor=factor)):
        train.fit(experiment, str(workdir), quiet=True)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (workdir / name).read_text().splitlines()]

    trained = [line for line in lines("metrics.jsonl") if line["split"] == "train"]
    skipped = [line for line in lines("logbook.jsonl") if line["event"] == "skipped"]
    return [*trained, *skipped]


def draw_gradient_spike() -> Figure:
    """Draw gradient norm and loss of a run with five gradients a thousand times too large."""
    figure = Figure(figsize=(9, 4))
    panels = figure.subplots(1, 2)
    for number, (name, factor) in enumerate({"untouched": 1.0, "five bad batches": 1e3}.items()):
        with tempfile.TemporaryDirectory() as folder:
            found = spike_run(Path(folder), factor)
        kept = [each for each in found if "reason" not in each]
        bad = [each for each in found if "reason" in each]
        look = {"color": COLORS[number], "linewidth": 2.5 - 1.3 * number}
        for axes, value in zip(panels, ("grad_norm", "loss"), strict=True):
            axes.plot([e["step"] for e in kept], [e[value] for e in kept], label=name, **look)
            if bad:
                mark = {"color": COLORS[number], "markersize": 8}
                label = "skipped, then rolled back"
                axes.plot(
                    [e["step"] for e in bad], [e[value] for e in bad], "x", label=label, **mark
                )
    panels[0].set(xlabel="step", ylabel="gradient norm", yscale="log")
    panels[1].set(xlabel="step", ylabel="training loss (nats per token)")
    panels[1].legend()
    return figure


# ---- Traces of `--profile`: with the device busy, and waiting for batches ----

ROWS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "host: dispatch of a step": lambda event: event["name"] == "train",
    "loader: load_batch": lambda event: event["name"].endswith(" load_batch"),
    "XLA: program runs": lambda event: event["name"].startswith("ThunkExecutor::Execute"),
}
"""Rows of the figure, and the events of each."""


def traced_experiment() -> Experiment:
    """Return the quickstart with small batches, and nothing between the steps."""
    return dataclasses.replace(
        find_experiment("quickstart"),
        steps=6,
        batch_size=8,
        profile="3:6",
        log_every=1,
        evaluation=EvaluationConfig(every=0, num_batches=1),
        sample=SampleConfig(),
    )


def draw_trace(axes: Axes, title: str) -> None:
    """Train, and draw one line of bars for each row from the timed events of the trace."""
    with tempfile.TemporaryDirectory() as folder:
        train.fit(traced_experiment(), folder, quiet=True)
        [file] = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X"]
    for row, belongs in enumerate(ROWS.values()):
        # From microseconds to seconds. Dispatch takes a millisecond, so thin bars are widened.
        bars = [(e["ts"] / 1e6, max(e["dur"] / 1e6, 0.02)) for e in timed if belongs(e)]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=COLORS[row])
    axes.set(yticks=range(len(ROWS)), yticklabels=list(ROWS), title=title)
    axes.invert_yaxis()


def draw_profile() -> Figure:
    """Trace steps of a small model twice, the second time with a pause in loading each batch."""
    load_at_once = loop.TrainingLoop.load_batch

    def load_batch(self: Any, cursor: int) -> Any:
        time.sleep(4)
        return load_at_once(self, cursor)

    figure = Figure(figsize=(9, 4.5))
    above, below = figure.subplots(2, sharex=True)
    draw_trace(above, "the device is busy: steps follow each other")
    with mock.patch.object(loop.TrainingLoop, "load_batch", load_batch):
        draw_trace(below, "input stall: the device waits for load_batch")
    below.set_xlabel("seconds since the trace began")
    return figure


def explanations() -> None:
    """Draw the masks, steps of attention and diagrams of docs/explanation."""
    save_figure(draw_masks(), FIGURES / "masks.png")
    save_figure(draw_attention_steps(), FIGURES / "attention_steps.png")
    save_figure(draw_model(), FIGURES / "model.png")
    save_figure(draw_stacked_layers(), FIGURES / "stacked_layers.png")
    save_figure(draw_exact_resume(), FIGURES / "exact_resume.png")


def pictures() -> None:
    """Draw pictures of textbooks from the code: activations, learning rates, formats, a spike."""
    save_figure(draw_activations(), FIGURES / "activations.png")
    save_figure(draw_learning_rates(), FIGURES / "learning_rates.png")
    save_figure(draw_float_formats(), FIGURES / "float_formats.png")
    save_figure(draw_gradient_spike(), FIGURES / "gradient_spike.png")


def trace_figure() -> None:
    """Draw the figure of docs/profiling.md from two traces of this machine."""
    save_figure(draw_profile(), FIGURES / "profile.png")

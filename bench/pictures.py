"""Pictures of textbooks, drawn from this code: activations, schedules, float formats, a spike.

    python -m bench.pictures [--only activations] [--folder docs/figures]

- activations.png: the activations of feed-forward layers and their derivatives.
- learning_rates.png: the learning rate over a run, by shape of the schedule.
- float_formats.png: bits of the float formats, and the error of rounding numbers to them.
- gradient_spike.png: gradient norm and loss over a small run with five batches whose gradients are
  a thousand times too large, and over the same run without them (`bench.drills.spikes`).
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure

import train
from bench.drills.faults import Fault, planted
from bench.drills.spikes import decoder
from train.optim.schedules import ScheduleConfig, Shape
from transformer.layers.activations import ACTIVATIONS, swish

FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

SPIKE_STEPS, SPIKE_FACTOR = 150, 1000.0


# ---- Activations ----


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


def draw_activations(path: Path) -> None:
    """Draw the activations of feed-forward layers, and their derivatives."""
    x = np.linspace(-4, 3, 501)
    figure = Figure(figsize=(9, 3.8), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2)
    for name, curves in activation_curves(x).items():
        for axes, curve in zip(panels, curves, strict=True):
            axes.plot(x, curve, lw=1.4, label=name)
    panels[0].set(title="activation", xlabel="x", ylabel="f(x)", ylim=(-0.5, 4))
    panels[1].set(title="derivative", xlabel="x", ylabel="f '(x)", ylim=(-0.5, 3))
    panels[0].legend(frameon=False, fontsize="small")
    _save(figure, panels, path)


# ---- Learning rates ----


def learning_rates(steps: int = 1000, width: int = 512) -> dict[str, np.ndarray]:  # [steps]
    """Return the learning rate of every update, by shape; the peak is 1e-3 except as published."""
    updates = jnp.arange(1, steps + 1)
    warmup = steps // 10
    schedules = {shape: ScheduleConfig(shape, 1e-3, warmup) for shape in get_args(Shape)}
    schedules["inverse_sqrt as published"] = ScheduleConfig("inverse_sqrt", 0.0, warmup)
    return {
        name: np.asarray(jax.vmap(config.make(steps=steps, width=width))(updates))
        for name, config in schedules.items()
    }


def draw_learning_rates(path: Path) -> None:
    """Draw the learning rate over a run."""
    figure = Figure(figsize=(6.5, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, rates in learning_rates().items():
        if name != "inverse_sqrt as published":  # its peak depends on the width
            axes.plot(np.arange(1, len(rates) + 1), rates, lw=1.4, label=name)
    axes.set(xlabel="update", ylabel="learning rate", title="warm-up of 100 updates, 1,000 in all")
    axes.legend(frameon=False, fontsize="small")
    _save(figure, [axes], path)


# ---- Float formats ----


def rounding_errors(x: np.ndarray) -> dict[str, np.ndarray]:  # x: [n] float64
    """Return the relative error of rounding positive numbers to each format; infinity: overflow."""
    errors = {}
    for name in FORMATS:
        with np.errstate(over="ignore"):
            rounded = x.astype(jnp.dtype(name)).astype(np.float64)
        errors[name] = np.where(np.isfinite(rounded), np.abs(rounded - x) / x, np.inf)
    return errors


def largest_errors(
    exponents: np.ndarray,  # [n]
) -> dict[str, np.ndarray]:  # [n]
    """Return the largest relative error among numbers between 2^e and 2^(e + 1), by format."""
    x = 2.0 ** (exponents[:, None] + np.linspace(0, 1, 64, endpoint=False))
    return {
        name: errors.reshape(x.shape).max(axis=1)
        for name, errors in rounding_errors(x.ravel()).items()
    }


def draw_float_formats(path: Path) -> None:
    """Draw the bits of each format, and its largest rounding error over the size of numbers."""
    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    bits, error = figure.subplots(1, 2, width_ratios=(1, 1.3))
    for row, name in enumerate(FORMATS):
        info = jnp.finfo(name)
        left = 0
        for kind, width, color in (
            ("sign", 1, "C3"),
            ("exponent", info.nexp, "C0"),
            ("fraction", info.nmant, "C2"),
        ):
            bits.barh(row, width, left=left, color=color, edgecolor="white", label=kind)
            bits.text(left + width / 2, row, str(width), ha="center", va="center", fontsize=8)
            left += width
    bits.set(xlabel="bits", yticks=range(len(FORMATS)), yticklabels=FORMATS)
    bits.invert_yaxis()
    handles, labels = bits.get_legend_handles_labels()
    bits.legend(handles[:3], labels[:3], frameon=False, loc="lower right", fontsize="small")
    exponents = np.arange(-40, 41)
    for name, largest in largest_errors(exponents).items():
        shown = np.where(np.isfinite(largest), largest, np.nan)
        error.semilogy(2.0**exponents, shown, lw=1.4, label=name)
    error.set(
        xscale="log",
        xlabel="size of a number",
        ylabel="largest relative error of rounding",
        title="1: rounded to zero. A curve ends where numbers overflow",
        ylim=(1e-10, 3),
    )
    error.title.set_fontsize("small")
    error.legend(frameon=False, fontsize="small", loc="lower center", ncols=2)
    _save(figure, [error], path)


# ---- A spike ----


def spike_run(folder: Path, steps: int, factor: float) -> list[dict[str, Any]]:
    """Train a small run with five bad batches in its middle; return its steps in their order.

    Steps that were skipped have the key `reason`; `factor` 1 leaves the run untouched.
    """
    experiment = dataclasses.replace(decoder(folder, steps), log_every=1)
    workdir = folder / "run"
    with planted(Fault(steps // 2, count=5, factor=factor)):
        train.fit(experiment, str(workdir), quiet=True)

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (workdir / name).read_text().splitlines()]

    trained = [line for line in lines("metrics.jsonl") if line["split"] == "train"]
    skipped = [line for line in lines("logbook.jsonl") if line["event"] == "skipped"]
    return [*trained, *skipped]


def draw_spike(path: Path) -> None:
    """Draw gradient norm and loss of a run with a planted spike, and of the same run without."""
    runs: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, factor in (("untouched", 1.0), ("five bad batches", SPIKE_FACTOR)):
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = spike_run(Path(folder), SPIKE_STEPS, factor)
    figure = Figure(figsize=(9, 3.8), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, value in zip(panels, ("grad_norm", "loss"), strict=True):
        for name, steps in runs.items():
            kept = [each for each in steps if "reason" not in each]
            bad = [each for each in steps if "reason" in each]
            [line] = axes.plot(
                [each["step"] for each in kept], [each[value] for each in kept], lw=1, label=name
            )
            if bad:
                axes.plot(
                    [each["step"] for each in bad],
                    [each[value] for each in bad],
                    "x",
                    color=line.get_color(),
                    label="skipped, then rolled back",
                )
        axes.set(xlabel="step", ylabel=value.replace("grad_norm", "gradient norm"))
    panels[0].set_yscale("log")
    panels[1].set_ylabel("training loss (nats per token)")
    panels[0].legend(frameon=False, fontsize="small")
    _save(figure, panels, path)


def _save(figure: Figure, panels: Sequence[Any], path: Path) -> None:
    for axes in panels:
        axes.grid(visible=True, alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "activations": draw_activations,
    "learning_rates": draw_learning_rates,
    "float_formats": draw_float_formats,
    "gradient_spike": draw_spike,
}
"""What draws each picture, by the name of its file."""


def main(folder: Path = Path("docs/figures"), only: tuple[str, ...] = tuple(PICTURES)) -> None:
    """Draw the pictures into a folder."""
    for name in only:
        PICTURES[name](folder / f"{name}.png")
        print(folder / f"{name}.png")


if __name__ == "__main__":
    tyro.cli(main)

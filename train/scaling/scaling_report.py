"""Report of a scaling analysis: its tables on the console, its figure and its files.

The figure is that of Kaplan et al. 2020 (figure 1): loss against compute, data and size.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from train.data.files import AnyPath, expand_path
from train.runtime.writing import explain_write_errors, write_atomically
from train.scaling.analysis import (
    CONSTANTS,
    Analysis,
    HeldOutPrediction,
    OptimumForBudget,
    best_losses,
    format_csv,
)
from train.scaling.design import format_count
from train.scaling.laws import Interval, Runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_SYMBOLS = {"parameters": "N", "tokens": "D", "compute": "C"}

_MAX_LEGEND_ROWS = 6

_FIT, _LAW = "#000000", "#666666"
_TITLES = {
    "compute": "training compute C = 6 N D (FLOPs)",
    "tokens": "training tokens D",
    "parameters": "parameters N (without embeddings)",
}
"""Axis labels of the panels, from left to right."""


def print_analysis(analysis: Analysis, console: Console | None = None) -> None:
    """Print the fits to a console, by default standard output."""
    console = console or Console()
    console.print(_laws_table(analysis))
    if analysis.optima:
        console.print(_optima_table(analysis.optima))
    if analysis.minima:
        console.print(_minima_table(analysis))
    if analysis.held_out is not None:
        console.print(_held_out_table(analysis.held_out))
    for note in analysis.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _laws_table(analysis: Analysis) -> Table:
    table = Table(title=f"Scaling laws of {len(analysis.runs.loss)} runs", title_justify="left")
    table.add_column("law")
    table.add_column("constants (95% interval)")
    for name, law in analysis.kaplan.items():
        symbol = _SYMBOLS[name]
        fitted = "no fit" if law is None else f"{symbol}c {law.scale:.3g}, α {law.exponent:.4f}"
        table.add_row(f"L({symbol}) = ({symbol}c / {symbol})^α", fitted)
    constants = "\n".join(
        f"{name:<6}{getattr(analysis.law, name):<10.5g} ({_range(analysis.intervals[name])})"
        for name in CONSTANTS
    )
    table.add_row("L(N, D) = E + A / N^alpha + B / D^beta", constants)
    return table


def _optima_table(optima: Sequence[OptimumForBudget]) -> Table:
    table = Table(title="Compute-optimal models (95% interval)", title_justify="left")
    for name in ("FLOPs", "N", "D", "D / N", "loss", "largest run"):
        table.add_column(name, justify="right")
    for each in optima:
        best = each.best
        table.add_row(
            f"{best.flops:.3g}",
            f"{format_count(best.parameters)}\n({_range(each.parameters, counts=True)})",
            f"{format_count(best.tokens)}\n({_range(each.tokens, counts=True)})",
            f"{best.tokens / best.parameters:.1f}",
            f"{best.loss:.4f}\n({_range(each.loss)})",
            f"x {each.extrapolation:.3g}",
        )
    return table


def _minima_table(analysis: Analysis) -> Table:
    table = Table(title="Minima of equal compute (isoFLOP)", title_justify="left")
    for name in ("FLOPs", "N", "D", "loss"):
        table.add_column(name, justify="right")
    for each in analysis.minima:
        counts = (format_count(each.parameters), format_count(each.tokens))
        table.add_row(f"{each.flops:.3g}", *counts, f"{each.loss:.4f}")
    return table


def _held_out_table(held_out: HeldOutPrediction) -> Table:
    title = "Largest runs, predicted from the others"
    table = Table(title=title, title_justify="left")
    for name in ("N", "D", "loss", "predicted", "error"):
        table.add_column(name, justify="right")
    columns = (*held_out.runs, held_out.predicted, held_out.relative_errors)
    for parameters, tokens, loss, predicted, error in zip(*columns, strict=True):
        counts = (format_count(parameters), format_count(tokens))
        table.add_row(*counts, f"{loss:.4f}", f"{predicted:.4f}", f"{error:+.2%}")
    return table


def _range(each: Interval, *, counts: bool = False) -> str:
    show = format_count if counts else "{:.4g}".format
    return f"{show(each.low)} to {show(each.high)}"


def plot_scaling(analysis: Analysis, path: AnyPath) -> None:
    """Draw three panels of loss against compute, tokens and parameters, all logarithmic.

    Points are runs. In the panels over compute and tokens a line joins the runs of one size; in the
    panel over parameters those of one number of tokens. Dashed: the power law of the best runs.
    Dotted, over compute: the lowest loss that the parametric law predicts for each budget.

    Raises:
      UserError: The file cannot be written.
    """
    # Not pyplot, which keeps all figures in memory and may choose a backend that needs a display.
    from matplotlib.figure import Figure  # importing it takes half a second
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(13, 4.4), dpi=120, layout="constrained")
    panels = dict(zip(_TITLES, figure.subplots(1, 3, sharey=True), strict=True))
    runs = analysis.runs
    x = {"compute": runs.flops, "tokens": runs.tokens, "parameters": runs.parameters}
    for name, axes in panels.items():
        groups = runs.tokens if name == "parameters" else runs.parameters
        _draw_groups(axes, x[name], runs.loss, groups, "D" if name == "parameters" else "N")
        _draw_power_law(axes, analysis, name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(_TITLES[name])
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # labels of all nine would overlap
        axes.tick_params(axis="x", which="both", labelsize="small")
        axes.grid(visible=True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_frontier(panels["compute"], analysis)
    _label_losses(panels["compute"], runs.loss)
    for axes in panels.values():
        columns = 1 if len(axes.lines) <= _MAX_LEGEND_ROWS else 2  # many rows would hide lines
        axes.legend(frameon=False, fontsize="x-small", ncols=columns)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _draw_groups(
    axes: Axes,
    x: np.ndarray,  # [runs]
    loss: np.ndarray,  # [runs]
    groups: np.ndarray,  # [runs] value that the runs of a line share
    symbol: str,
) -> None:
    """Draw a line for each group, colored by its value."""
    from matplotlib import colormaps

    values = np.unique(groups)
    for value, shade in zip(values, np.linspace(0.1, 0.85, len(values)), strict=True):
        chosen = np.flatnonzero(groups == value)
        chosen = chosen[np.argsort(x[chosen])]
        label = f"{symbol} = {format_count(value)}" if len(values) <= 10 else None
        color = colormaps["viridis"](shade)
        axes.plot(x[chosen], loss[chosen], "o-", color=color, ms=4, lw=1, label=label)


def _draw_power_law(axes: Axes, analysis: Analysis, name: str) -> None:
    law = analysis.kaplan[name]
    if law is None:
        return
    points, _ = best_losses(analysis.runs)[name]
    ends = np.array([points.min(), points.max()])
    label = f"L = ({law.scale:.2g} / {'CDN'['ctp'.index(name[0])]})^{law.exponent:.3f}"
    axes.plot(ends, law(ends), "--", color=_FIT, lw=1.2, label=label)


def _draw_frontier(axes: Axes, analysis: Analysis) -> None:
    if not analysis.has_optimum:
        return
    flops = np.geomspace(analysis.runs.flops.min(), analysis.runs.flops.max(), 50)
    losses = [analysis.law.optimum(float(each)).loss for each in flops]
    label = "E + A/N^α + B/D^β at its best N"
    axes.plot(flops, losses, ":", color=_LAW, lw=1.4, label=label)


def _label_losses(axes: Axes, loss: np.ndarray) -> None:
    """Label the loss axis with plain numbers: a sweep spans less than a decade."""
    from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

    axes.set_ylim(loss.min() * 0.98, loss.max() * 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("held-out loss (nats per token)")


def write_runs(runs: Runs, workdir: str) -> None:
    """Write `runs.csv`, before anything is fitted. Raises UserError if it cannot be written."""
    folder = expand_path(workdir)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "runs.csv", format_csv(runs))


def write_report(analysis: Analysis, workdir: str) -> AnyPath:
    """Write `scaling.json` and `scaling.png`; return the path of the figure.

    Raises:
      UserError: A file cannot be written.
    """
    folder = expand_path(workdir)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(analysis.as_dict(), indent=1, allow_nan=False)
    write_atomically(folder / "scaling.json", text + "\n")
    figure = folder / "scaling.png"
    plot_scaling(analysis, figure)
    return figure

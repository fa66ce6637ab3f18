"""Report of a scaling sweep: its design and its fits as tables, its figure and its files.

The figure is that of Kaplan et al. 2020 (figure 1): loss against compute, data and size.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from train.errors import UsageError, UserError
from train.figures import BLACK, GREY, figure_style, png, shades
from train.files import AnyPath, expand_path
from train.runtime.writing import explain_write_errors, write_atomically
from train.scaling.analysis import CONSTANTS, MIN_RUNS, Analysis, analyze, best_losses, format_csv
from train.scaling.design import SizedRun, format_count
from train.scaling.laws import Interval, Runs
from train.sweep.sweep_folder import RunResult
from train.telemetry.event_log import finite_or_none

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SYMBOLS = {"parameters": "N", "tokens": "D", "compute": "C"}

_MAX_LEGEND_ROWS = 6

_TITLES = {
    "compute": "training compute C = 6 N D (FLOPs)",
    "tokens": "training tokens D",
    "parameters": "parameters N (without embeddings)",
}
"""Axis labels of the panels, from left to right."""


# ---- The runs ----


def check_design(sized: Sequence[SizedRun]) -> None:
    """Raise UsageError, before anything is trained, if the runs cannot identify the law."""
    sizes = {each.parameters for each in sized}
    counts = {each.tokens for each in sized}
    if len(sized) < MIN_RUNS or len(sizes) < 2 or len(counts) < 2:
        raise UsageError(
            f"scaling: {len(sized)} runs of {len(sizes)} sizes and {len(counts)} numbers of tokens "
            f"cannot identify a law with {MIN_RUNS} constants; give {MIN_RUNS} runs or more, "
            "with 2 sizes or more and 2 numbers of tokens or more"
        )


def finished_runs(sized: Sequence[SizedRun], results: Mapping[str, RunResult]) -> Runs:
    """Return the sizes and losses of the runs that finished."""
    done = [each for each in sized if results[each.run.name].status == "finished"]
    return Runs(
        np.array([each.parameters for each in done], float),
        np.array([each.tokens for each in done], float),
        np.array([results[each.run.name].metrics["loss"] for each in done], float),
    )


def fit_results(
    sized: Sequence[SizedRun],
    results: Mapping[str, RunResult],
    *,
    budgets: Sequence[float] = (),
    bootstrap_samples: int = 200,
) -> Analysis:
    """Fit the laws to the runs that finished.

    Raises:
      UserError: Too few runs finished.
    """
    runs = finished_runs(sized, results)
    reasons = [each.error for each in results.values() if each.status == "failed"]
    try:
        analysis = analyze(runs, budgets=budgets, bootstrap_samples=bootstrap_samples)
    except ValueError as error:
        failed = f" ({len(reasons)} runs failed: {reasons[0]})" if reasons else ""
        raise UserError(f"scaling: {error}{failed}") from error
    if len(runs.loss) < len(sized):
        missing = len(sized) - len(runs.loss)
        note = f"{missing} of {len(sized)} runs failed and are left out of the fits"
        analysis = dataclasses.replace(analysis, notes=(*analysis.notes, note))
    return analysis


def design_as_dicts(
    sized: Sequence[SizedRun], results: Mapping[str, RunResult] | None = None
) -> list[dict[str, Any]]:
    """Return the runs as plain data, with their results if there are any."""
    rows = []
    for each in sized:
        experiment = each.run.experiment
        schedule: Any = experiment.schedule
        row = {
            "name": each.run.name,
            "parameters": each.parameters,
            "tokens": each.tokens,
            "d_model": experiment.model.d_model,
            "num_layers": experiment.model.num_layers,
            "steps": experiment.steps,
            "batch_size": experiment.batch_size,
            "seed": experiment.seed,
            "learning_rate": schedule.learning_rate,
            "matrix_lr_factor": getattr(experiment.optimizer, "matrix_lr_factor", 1.0),
            "flops": each.flops,
        }
        if results is not None:
            result = results[each.run.name]
            loss = finite_or_none(result.metrics.get("loss"))
            row |= {"status": result.status, "loss": loss, "seconds": result.seconds}
        rows.append(row)
    return rows


def print_design(
    sized: Sequence[SizedRun],
    results: Mapping[str, RunResult] | None = None,
    console: Console | None = None,
) -> None:
    """Print the runs, with their held-out losses once they are trained."""
    names = ["N", "D model", "layers", "tokens", "steps", "batch", "lr", "C = 6 N D"]
    table = _table(f"{len(sized)} runs", [*names, *(["loss", "seconds"] if results else [])])
    for row in design_as_dicts(sized, results):
        cells = [
            format_count(row["parameters"]),
            str(row["d_model"]),
            str(row["num_layers"]),
            format_count(row["tokens"]),
            str(row["steps"]),
            str(row["batch_size"]),
            f"{row['learning_rate']:.3g}",
            f"{row['flops']:.2e}",
        ]
        if results:
            loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
            cells += [loss if row["status"] == "finished" else "failed", f"{row['seconds']:.0f}"]
        table.add_row(*cells)
    (console or Console()).print(table)


# ---- The fits ----


def print_analysis(analysis: Analysis, console: Console | None = None) -> None:
    """Print the fits to a console, by default standard output."""
    console = console or Console()
    laws = Table("law", "constants (95% interval)", title_justify="left")
    laws.title = f"Scaling laws of {len(analysis.runs.loss)} runs"
    for name, law in analysis.kaplan.items():
        symbol = _SYMBOLS[name]
        fitted = "no fit" if law is None else f"{symbol}c {law.scale:.3g}, α {law.exponent:.4f}"
        laws.add_row(f"L({symbol}) = ({symbol}c / {symbol})^α", fitted)
    constants = [
        f"{name:<6}{getattr(analysis.law, name):<10.5g} ({_range(analysis.intervals[name])})"
        for name in CONSTANTS
    ]
    laws.add_row("L(N, D) = E + A / N^alpha + B / D^beta", "\n".join(constants))
    console.print(laws)
    optima = [
        [
            f"{best.flops:.3g}",
            f"{format_count(best.parameters)}\n({_range(parameters, counts=True)})",
            f"{format_count(best.tokens)}\n({_range(tokens, counts=True)})",
            f"{best.tokens / best.parameters:.1f}",
            f"{best.loss:.4f}\n({_range(loss)})",
            f"x {extrapolation:.3g}",
        ]
        for best, parameters, tokens, loss, extrapolation in analysis.optima
    ]
    minima = [
        [f"{flops:.3g}", format_count(parameters), format_count(tokens), f"{loss:.4f}"]
        for flops, parameters, tokens, loss in analysis.minima
    ]
    held = analysis.held_out
    held_out = held and [
        [format_count(n), format_count(d), f"{loss:.4f}", f"{predicted:.4f}", f"{error:+.2%}"]
        for n, d, loss, predicted, error in zip(
            *held.runs, held.predicted, held.relative_errors, strict=True
        )
    ]
    for title, names, rows in (
        ("Compute-optimal models (95% interval)", "FLOPs;N;D;D / N;loss;largest run", optima),
        ("Minima of equal compute (isoFLOP)", "FLOPs;N;D;loss", minima),
        ("Largest runs, predicted from the others", "N;D;loss;predicted;error", held_out),
    ):
        if rows:
            table = _table(title, names.split(";"))
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for note in analysis.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, names: Sequence[str]) -> Table:
    """Return a table of numbers."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _range(each: Interval, *, counts: bool = False) -> str:
    show = format_count if counts else "{:.4g}".format
    return f"{show(each.low)} to {show(each.high)}"


@figure_style()
def draw_scaling(analysis: Analysis) -> Figure:
    """Draw three panels of loss against compute, tokens and parameters, all logarithmic.

    Points are runs. In the panels over compute and tokens a line joins the runs of one size; in the
    panel over parameters those of one number of tokens. Dashed: the power law of the best runs.
    Dotted, over compute: the lowest loss that the parametric law predicts for each budget.
    """
    # Not pyplot, which keeps all figures in memory and may choose a backend that needs a display.
    from matplotlib.figure import Figure  # importing it takes half a second
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10.5, 5.6))
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
    _draw_frontier(panels["compute"], analysis)
    _label_losses(panels["compute"], runs.loss)
    for axes in panels.values():  # below: the curves leave no room
        columns = 1 if len(axes.lines) <= _MAX_LEGEND_ROWS else 2
        axes.legend(fontsize="small", ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def plot_scaling(analysis: Analysis, path: AnyPath) -> None:
    """Write the figure of `draw_scaling`.

    Raises:
      UserError: The file cannot be written.
    """
    write_atomically(path, png(draw_scaling(analysis)))


def _draw_groups(
    axes: Axes,
    x: np.ndarray,  # [runs]
    loss: np.ndarray,  # [runs]
    groups: np.ndarray,  # [runs] value that the runs of a line share
    symbol: str,
) -> None:
    """Draw a line for each group, colored by its value."""
    values = np.unique(groups)
    for value, color in zip(values, shades(len(values)), strict=True):
        chosen = np.flatnonzero(groups == value)
        chosen = chosen[np.argsort(x[chosen])]
        label = f"{symbol} = {format_count(value)}" if len(values) <= 10 else None
        axes.plot(x[chosen], loss[chosen], "o-", color=color, linewidth=1, label=label)


def _draw_power_law(axes: Axes, analysis: Analysis, name: str) -> None:
    law = analysis.kaplan[name]
    if law is None:
        return
    points, _ = best_losses(analysis.runs)[name]
    ends = np.array([points.min(), points.max()])
    label = f"L = ({law.scale:.2g} / {'CDN'['ctp'.index(name[0])]})^{law.exponent:.3f}"
    axes.plot(ends, law(ends), "--", color=BLACK, marker="none", label=label)


def _draw_frontier(axes: Axes, analysis: Analysis) -> None:
    if not analysis.law.has_optimum:
        return
    flops = np.geomspace(analysis.runs.flops.min(), analysis.runs.flops.max(), 50)
    losses = [analysis.law.optimum(float(each)).loss for each in flops]
    label = "E + A/N^α + B/D^β at its best N"
    axes.plot(flops, losses, ":", color=GREY, marker="none", label=label)


def _label_losses(axes: Axes, loss: np.ndarray) -> None:
    """Label the loss axis with plain numbers: a sweep spans less than a decade."""
    from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter

    axes.set_ylim(loss.min() * 0.98, loss.max() * 1.02)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("held-out loss (nats per token)")


def write_report(analysis: Analysis, workdir: str) -> AnyPath:
    """Write `scaling.json` and `scaling.png`; return the path of the figure.

    Raises:
      UserError: A file cannot be written.
    """
    folder = make_folder(workdir)
    text = json.dumps(analysis.as_dict(), indent=1, allow_nan=False)
    write_atomically(folder / "scaling.json", text + "\n")
    plot_scaling(analysis, folder / "scaling.png")
    return folder / "scaling.png"


def write_runs(runs: Runs, workdir: str) -> None:
    """Write `runs.csv`, before anything is fitted. Raises UserError if it cannot be written."""
    write_atomically(make_folder(workdir) / "runs.csv", format_csv(runs))


def make_folder(workdir: str) -> AnyPath:
    """Return a folder, which is made if it is not there."""
    folder = expand_path(workdir)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder

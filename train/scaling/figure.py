"""Figure of a scaling sweep, and the files of its analysis.

The figure is that of Kaplan et al. 2020 (figure 1): loss against compute, data and size.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np

from train.data.files import AnyPath, expand_path
from train.run_folder.writing import explain_write_errors, write_atomically
from train.scaling.analysis import Analysis, best_losses, format_csv
from train.scaling.design import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIT, _LAW = "#000000", "#666666"
_TITLES = {
    "compute": "training compute C = 6 N D (FLOPs)",
    "tokens": "training tokens D",
    "parameters": "parameters N (without embeddings)",
}
"""Axis labels of the panels, from left to right."""


def plot_scaling(analysis: Analysis, path: AnyPath) -> None:
    """Draw three panels of loss against compute, tokens and parameters, all logarithmic.

    Points are runs. In the panels over compute and tokens a line joins the runs of one size; in the
    panel over parameters those of one number of tokens. Dashed: the power law of the best runs.
    Dotted, over compute: the lowest loss that the parametric law predicts for each budget.

    Raises:
      UserError: The file cannot be written.
    """
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
        axes.legend(frameon=False, fontsize="x-small")
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


def write_report(analysis: Analysis, workdir: str) -> AnyPath:
    """Write `runs.csv`, `scaling.json` and `scaling.png`; return the path of the figure.

    Raises:
      UserError: A file cannot be written.
    """
    folder = expand_path(workdir)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "runs.csv", format_csv(analysis.runs))
    write_atomically(folder / "scaling.json", json.dumps(analysis.as_dict(), indent=1) + "\n")
    figure = folder / "scaling.png"
    plot_scaling(analysis, figure)
    return figure

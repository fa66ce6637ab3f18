"""Tables of an analysis on the console: the fitted laws, the optimum and the prediction."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from train.scaling.analysis import CONSTANTS, Analysis, HeldOutPrediction, OptimumForBudget
from train.scaling.design import format_count
from train.scaling.laws import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

_SYMBOLS = {"parameters": "N", "tokens": "D", "compute": "C"}


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


def _optima_table(optima: "Sequence[OptimumForBudget]") -> Table:
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

"""Scaling laws: one law for each of parameters, data and compute, and the joint law of two.

The quickstart's recipe on WikiText-2 at every width and number of training tokens, except where
that takes more than `max_flops`. `python -m train scaling` designs, trains and fits such runs; this
study adds what the laws mean: how far the loss falls if parameters grow and tokens do not, the
reverse, and both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.claims.small_runs import on_wikitext, with_vocabulary
from bench.studies.record import Study, markdown_table
from configs.quickstart import EXPERIMENTS
from train.experiment import CheckpointConfig
from train.scaling.analysis import CONSTANTS, Analysis
from train.scaling.design import SizedRun, SizeRules, design_runs, format_count, model_of_width
from train.scaling.laws import PowerLaw, fit_power_law
from train.scaling.scaling_report import check_design, draw_scaling, fit_results
from train.sweep.sweep_folder import RunResult

WIDTHS = (64, 128, 192, 256)
TOKENS = (2e5, 4e5, 8e5, 1.6e6, 3.2e6, 6.4e6, 1.28e7)


def design(max_flops: float, seeds: int, data: Path) -> list[SizedRun]:
    """Return the runs of the quickstart's recipe, in the order of their compute."""
    base, rules = with_vocabulary(on_wikitext(EXPERIMENTS["quickstart"], data), 1024), SizeRules()
    base = dataclasses.replace(base, checkpoint=CheckpointConfig(every=400, keep_last=1))
    models = [model_of_width(base.model, width, rules) for width in WIDTHS]
    sized = design_runs(base, models, tokens=TOKENS, seeds=seeds, rules=rules)
    return [each for each in sized if each.flops <= max_flops]


def mean_over_seeds(
    sized: Sequence[SizedRun], results: Mapping[str, RunResult]
) -> dict[tuple[int, int], float]:
    """Return the mean loss by (N, D)."""
    losses: dict[tuple[int, int], list[float]] = {}
    for each in sized:
        at = each.parameters, each.tokens
        losses.setdefault(at, []).append(results[each.run.name].value)
    return {at: float(np.mean(values)) for at, values in losses.items()}


def held_back(losses: Mapping[tuple[int, int], float]) -> list[tuple[str, int, int, float]]:
    """Return the corners of the largest rectangle of runs: neither, one, and both grow.

    Its smaller corner is the smallest model with the fewest tokens; of the others the one of the
    most compute that has both neighbours is taken.

    Returns:
      (what grows, N, D, loss) of its four corners.
    """
    small, few = min(n for n, _ in losses), min(d for _, d in losses)
    corners = [
        (n, d)
        for n, d in losses
        if n > small and d > few and {(n, few), (small, d)} <= losses.keys()
    ]
    large, many = max(corners, key=lambda at: at[0] * at[1])
    named = {
        "neither": (small, few),
        "parameters": (large, few),
        "tokens": (small, many),
        "both": (large, many),
    }
    return [(name, *at, losses[at]) for name, at in named.items()]


def law_rows(losses: Mapping[tuple[int, int], float], fixed: int) -> list[list[str]]:
    """Return a power law of one of N and D at each value of the other that has 3 runs or more.

    Args:
      losses: By (N, D).
      fixed: 0: laws of D at each N. 1: laws of N at each D.
    """
    other, symbol = ("N", "D") if fixed == 0 else ("D", "N")
    rows = []
    for value in sorted({at[fixed] for at in losses}):
        points = sorted((at[1 - fixed], loss) for at, loss in losses.items() if at[fixed] == value)
        if len(points) < 3:
            continue
        try:
            cells = _law_cells(fit_power_law(*np.array(points, float).T))
        except ValueError:  # the loss does not fall
            cells = ["no fit", ""]
        rows.append([f"L({symbol}) at {other} = {format_count(value)}", *cells, str(len(points))])
    return rows


def _law_cells(law: PowerLaw) -> list[str]:
    return [f"{law.scale:.3g}", f"{law.exponent:.4f}"]


def tables(losses: Mapping[tuple[int, int], float], analysis: Analysis) -> list[str]:
    """Return the losses by N (rows) and D (columns), the fits, what grows, and predictions."""
    sizes, counts = (sorted({at[index] for at in losses}) for index in (0, 1))
    grid = [
        [format_count(n), *(f"{losses[n, d]:.4f}" if (n, d) in losses else "" for d in counts)]
        for n in sizes
    ]
    constants = [
        [
            name,
            f"{getattr(analysis.law, name):.4g}",
            f"{analysis.intervals[name].low:.3g} to {analysis.intervals[name].high:.3g}",
        ]
        for name in CONSTANTS
    ]
    compute_law, corners, held = analysis.kaplan["compute"], held_back(losses), analysis.held_out
    assert compute_law is not None
    assert held is not None
    best = ["L(C), the best runs", *_law_cells(compute_law), ""]
    first = corners[0][-1]
    growth = [
        [name, format_count(n), format_count(d), f"{loss:.4f}", f"{loss - first:+.4f}"]
        for name, n, d, loss in corners
    ]
    predictions = [
        [format_count(n), format_count(d), f"{loss:.4f}", f"{predicted:.4f}", f"{error:+.2%}"]
        for n, d, loss, predicted, error in zip(
            *held.runs, held.predicted, held.relative_errors, strict=True
        )
    ]
    return [
        markdown_table(["N \\ D", *map(format_count, counts)], grid),
        markdown_table(["constant", "fit", "95% interval"], constants),
        markdown_table(
            ["law", "x_c", "α", "runs"], [*law_rows(losses, 1), *law_rows(losses, 0), best]
        ),
        markdown_table(["grows", "N", "D", "loss", "change"], growth),
        markdown_table(["N", "D", "loss", "predicted", "error"], predictions),
    ]


def main(data: Path, max_flops: float = 1e14, seeds: int = 1, minutes: float = 0) -> None:
    """How does the loss fall with parameters, with tokens and with both?"""
    sized = design(max_flops, seeds, data)
    check_design(sized)
    study = Study("scaling", minutes)
    found = study.train([each.run for each in sized])
    results = {name: each.result for name, each in found.items()}
    analysis = fit_results(sized, results, budgets=())
    plain: dict[str, Any] = analysis.as_dict()
    plain["fitted_runs"] = plain.pop("runs")  # `runs` is their number in every record
    study.write(tables(mean_over_seeds(sized, results), analysis), draw_scaling(analysis), plain)

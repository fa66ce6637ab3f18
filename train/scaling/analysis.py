"""Analysis of training runs: every fit of `train.scaling.laws`, with intervals and a prediction."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train.errors import UserError, as_damaged, as_user_error
from train.files import expand_path
from train.scaling.laws import (
    Interval,
    Optimum,
    ParametricLaw,
    PowerLaw,
    Runs,
    bootstrap_parametric_law,
    fit_parametric_law,
    fit_power_law,
    interval,
    isoflop_minima,
    lower_envelope,
)
from train.telemetry.event_log import finite_or_none

COLUMNS = ("parameters", "tokens", "loss")
"""Columns of a CSV of runs; others are ignored."""

HELD_OUT_FRACTION = 0.2
"""Fraction of the runs, those of the most compute, that the test of the prediction holds out."""

MIN_RUNS = 5
"""Fewest runs of a fit: the parametric law has 5 constants."""

CONSTANTS = ("E", "A", "B", "alpha", "beta")
"""Constants of the parametric law."""


class OptimumForBudget(NamedTuple):
    """Compute-optimal model of a budget, with bootstrap intervals."""

    best: Optimum
    parameters: Interval
    tokens: Interval
    loss: Interval
    extrapolation: float
    """Budget as a multiple of the largest run's compute."""


class HeldOutPrediction(NamedTuple):
    """Losses of the largest runs as predicted by a fit to the others."""

    runs: Runs
    predicted: np.ndarray  # [held-out runs]

    @property
    def relative_errors(self) -> np.ndarray:  # [held-out runs]
        """Predicted over measured loss, minus 1."""
        return self.predicted / self.runs.loss - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """Everything that is fitted to one set of runs."""

    runs: Runs
    """Runs with a finite loss."""
    kaplan: dict[str, PowerLaw | None]
    """L(x) for x = `parameters`, `tokens` and `compute`; None if no power law fits."""
    law: ParametricLaw
    intervals: dict[str, Interval]
    """95% bootstrap interval of each constant of the law."""
    minima: list[Optimum]
    optima: list[OptimumForBudget]
    """One for each requested budget."""
    held_out: HeldOutPrediction | None
    """None if too few runs would be left."""
    notes: tuple[str, ...] = ()
    """Reasons for what is missing, and warnings."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`; what is not finite is None."""
        held_out = None
        if self.held_out is not None:
            errors = np.abs(self.held_out.relative_errors)
            held_out = {
                "runs": [
                    {**run, "predicted": float(predicted)}
                    for run, predicted in zip(
                        _as_dicts(self.held_out.runs), self.held_out.predicted, strict=True
                    )
                ],
                "mean_relative_error": float(errors.mean()),
                "max_relative_error": float(errors.max()),
            }
        plain = {
            "runs": _as_dicts(self.runs),
            "chinchilla": {
                **dataclasses.asdict(self.law),
                "intervals": {name: list(each) for name, each in self.intervals.items()},
            },
            "kaplan": {
                name: None if law is None else dataclasses.asdict(law)
                for name, law in self.kaplan.items()
            },
            "isoflop_minima": [each._asdict() for each in self.minima],
            "optimum": [
                {
                    **each.best._asdict(),
                    "tokens_per_parameter": each.best.tokens / each.best.parameters,
                    "extrapolation": each.extrapolation,
                    "intervals": {name: list(getattr(each, name)) for name in COLUMNS},
                }
                for each in self.optima
            ],
            "held_out": held_out,
            "notes": list(self.notes),
        }
        return finite_or_none(plain)


def _as_dicts(runs: Runs) -> list[dict[str, float]]:
    rows = zip(*runs, strict=True)
    return [dict(zip(COLUMNS, map(float, row), strict=True)) for row in rows]


def analyze(
    runs: Runs, *, budgets: Sequence[float] = (), bootstrap_samples: int = 200, seed: int = 0
) -> Analysis:
    """Fit all laws to runs.

    Args:
      runs: Parameters without embeddings, training tokens and held-out loss of each run. Runs whose
        loss is not finite (they diverged) are left out.
      budgets: Training FLOPs to find the compute-optimal model for.
      bootstrap_samples: Resamples of the runs behind the 95% intervals.
      seed: Seed of the resampling.

    Raises:
      ValueError: The runs cannot identify the law.
    """
    notes = []
    finite = np.isfinite(runs.loss)
    if not finite.all():
        notes.append(f"{(~finite).sum()} runs diverged and are left out of the fits")
        runs = runs.select(finite)
    law = fit_parametric_law(runs)
    resampled = bootstrap_parametric_law(runs, law, samples=bootstrap_samples, seed=seed)
    intervals = {name: interval([getattr(each, name) for each in resampled]) for name in CONSTANTS}
    kaplan: dict[str, PowerLaw | None] = {}
    for name, (x, loss) in best_losses(runs).items():
        try:
            kaplan[name] = fit_power_law(x, loss)
        except ValueError as error:
            kaplan[name] = None
            notes.append(f"L({name}): {error}")
    if budgets and not law.has_optimum:
        notes.append("no optimum: a fitted constant is not positive and finite; add runs")
        budgets = ()
    held_out = predict_held_out(runs)
    if held_out is None:
        notes.append("too few runs to hold the largest out and predict them")
    optima = [_optimum(budget, runs, law, resampled) for budget in budgets]
    minima = isoflop_minima(runs)
    return Analysis(runs, kaplan, law, intervals, minima, optima, held_out, tuple(notes))


def best_losses(runs: Runs) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the points of each of Kaplan's power laws: x and the lowest loss.

    L(N) has the best run of each size, L(D) the best of each number of tokens, L(C) the frontier:
    the runs that none of less compute beats.
    """
    frontier = lower_envelope(runs.flops, runs.loss)
    return {
        "parameters": _lowest(runs.parameters, runs.loss),
        "tokens": _lowest(runs.tokens, runs.loss),
        "compute": (runs.flops[frontier], runs.loss[frontier]),
    }


def _lowest(x: np.ndarray, loss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each different x, sorted, and the lowest loss at it."""
    values = np.unique(x)
    return values, np.array([loss[x == value].min() for value in values])


def predict_held_out(runs: Runs) -> HeldOutPrediction | None:
    """Hold out the runs of the most compute, fit the others, and predict the held-out losses.

    Returns:
      None if the others are too few, or all of one size or one number of tokens.
    """
    count = max(1, round(HELD_OUT_FRACTION * len(runs.loss)))
    order = np.argsort(runs.flops, kind="stable")
    rest, largest = runs.select(order[:-count]), runs.select(order[-count:])
    try:
        law = fit_parametric_law(rest)
    except ValueError:
        return None
    return HeldOutPrediction(largest, law(largest.parameters, largest.tokens))


def _optimum(
    budget: float, runs: Runs, law: ParametricLaw, resampled: Sequence[ParametricLaw]
) -> OptimumForBudget:
    fits = [each.optimum(budget) for each in resampled if each.has_optimum]
    fits = [each for each in fits if np.isfinite(each).all()]
    parameters, tokens, loss = (
        interval([getattr(each, name) for each in fits]) if fits else Interval(math.nan, math.nan)
        for name in COLUMNS
    )
    ratio = budget / float(runs.flops.max())
    return OptimumForBudget(law.optimum(budget), parameters, tokens, loss, ratio)


# ---- CSV ----


def read_csv(path: str) -> Runs:
    """Read runs from a CSV with the columns `parameters`, `tokens` and `loss`.

    Raises:
      UserError: It cannot be read, lacks a column, has too few runs, or a value is not a positive
        number.
    """
    with as_user_error(path):
        data = expand_path(path).read_bytes()
    with as_damaged(path, "UTF-8 text", "give a CSV file"):
        text = data.decode("utf-8-sig")  # a spreadsheet's CSV begins with a mark
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    rows.fieldnames = header = [name.strip() for name in rows.fieldnames or ()]
    if missing := [name for name in COLUMNS if name not in header]:
        raise UserError(
            f"{path}: has no column {missing[0]}; its first line must name "
            f"{', '.join(COLUMNS)} (found: {', '.join(header) or 'nothing'})"
        )
    runs = [
        [_positive(row[name], f"{path} line {rows.line_num}: {name}") for name in COLUMNS]
        for row in rows
        if any((row[name] or "").strip() for name in COLUMNS)  # spreadsheets end in empty rows
    ]
    if len(runs) < MIN_RUNS:
        raise UserError(
            f"{path}: has {len(runs)} runs, and the law has {MIN_RUNS} constants; "
            f"give {MIN_RUNS} runs or more"
        )
    return Runs(*np.array(runs, float).T)


def _positive(cell: str | None, name: str) -> float:
    """Return the positive number in a cell. Raise UserError if it is none."""
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} {cell or 'is missing'}: give a positive number such as 1.5e6")
    return value


def format_csv(runs: Runs) -> str:
    """Return runs as CSV, which `read_csv` reads back."""
    lines = [
        ",".join(repr(int(x) if float(x).is_integer() else float(x)) for x in run)
        for run in zip(*runs, strict=True)
    ]
    return "\n".join([",".join(COLUMNS), *lines, ""])

"""Results of a scaling sweep: its runs as a table and as data, and the fits to them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from train.errors import UsageError, UserError
from train.scaling.analysis import MIN_RUNS, Analysis, analyze
from train.scaling.design import SizedRun, format_count
from train.scaling.laws import Runs
from train.sweep.sweep_folder import RunResult
from train.telemetry.event_log import finite_or_none


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
    try:
        analysis = analyze(runs, budgets=budgets, bootstrap_samples=bootstrap_samples)
    except ValueError as error:
        reasons = [each.error for each in results.values() if each.status == "failed"]
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
        row = {"name": each.run.name, **_settings(each), "flops": each.flops}
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
    table = Table(title=f"{len(sized)} runs", title_justify="left")
    names = ("N", "D model", "layers", "tokens", "steps", "batch", "lr", "C = 6 N D")
    for name in (*names, *(("loss", "seconds") if results is not None else ())):
        table.add_column(name, justify="right")
    for each in sized:
        numbers = _settings(each)
        row = [
            format_count(each.parameters),
            str(numbers["d_model"]),
            str(numbers["num_layers"]),
            format_count(each.tokens),
            str(numbers["steps"]),
            str(numbers["batch_size"]),
            f"{numbers['learning_rate']:.3g}",
            f"{each.flops:.2e}",
        ]
        if results is not None:
            result = results[each.run.name]
            finished = result.status == "finished"
            row += [f"{result.value:.4f}" if finished else "failed", f"{result.seconds:.0f}"]
        table.add_row(*row)
    (console or Console()).print(table)


def _settings(each: SizedRun) -> dict[str, Any]:
    """Return the numbers of a run that the rules have set."""
    experiment = each.run.experiment
    schedule: Any = experiment.schedule
    return {
        "parameters": each.parameters,
        "tokens": each.tokens,
        "d_model": experiment.model.d_model,
        "num_layers": experiment.model.num_layers,
        "steps": experiment.steps,
        "batch_size": experiment.batch_size,
        "seed": experiment.seed,
        "learning_rate": schedule.learning_rate,
        "matrix_lr_factor": getattr(experiment.optimizer, "matrix_lr_factor", 1.0),
    }

"""The verb `evaluate W [--split S]`."""

from __future__ import annotations

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """Print the metrics of a run on a whole split of its data."""

    split: str = "validation"
    """Split to evaluate: train, validation, or test if the data have one."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights (the newest checkpoint, unless
    the run keeps its best one or averages several)."""
    average_checkpoints: int | None = None
    """Average the weights of this many checkpoints: the selected one and those before it."""


def main(arguments: list[str]) -> int:
    """Print a run's metrics; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "evaluate")
    given = parse(EvaluateArguments, arguments, verb="evaluate W")
    from train.evaluation.evaluator import evaluate_run
    from train.run import load
    from train.tasks.registry import make_task

    run = load(workdir, step=given.step, average_checkpoints=given.average_checkpoints)
    metrics, notes = evaluate_run(run, given.split), make_task(run.experiment).metric_notes
    if json_wanted:
        print(json.dumps({"step": run.step, "split": given.split, **metrics, **notes}))
    else:
        for name, value in metrics.items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        for name, text in notes.items():
            print(f"{name.replace('_', ' ')}: {text}")
    return 0

"""`python -m train evaluate W [--split S]`."""

from __future__ import annotations

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """The held-out metrics of a run, over a whole split."""

    split: str = "validation"
    """Which text: train, validation, or test if the data have one."""
    step: int | None = None
    """Which checkpoint; if not given, what the run is judged by: the newest, unless its settings
    ask for the best one or for a mean."""
    average_checkpoints: int | None = None
    """The mean of the weights of so many checkpoints: that one and those before it."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "evaluate")
    given = parse(EvaluateArguments, arguments, verb="evaluate W")
    from train.evaluation.evaluator import evaluate_run
    from train.run import load
    from train.tasks.registry import make_task

    run = load(workdir, step=given.step, average_checkpoints=given.average_checkpoints)
    metrics, quoted = evaluate_run(run, given.split), make_task(run.experiment).metric_notes
    if json_wanted:
        print(json.dumps({"step": run.step, "split": given.split, **metrics, **quoted}))
    else:
        for name, value in metrics.items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        for name, text in quoted.items():
            print(f"{name.replace('_', ' ')}: {text}")
    return 0

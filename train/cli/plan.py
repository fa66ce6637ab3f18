"""The verb `plan CONFIG --target v5p:8x8x16 [--a.b.c VALUE ...]`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import tyro

from train.cli.parsing import (
    as_usage_errors,
    kinds_help,
    parse,
    pop_json_flag,
    pop_positional,
    select_kinds,
)
from train.config.registry import find_experiment
from train.experiment import Experiment

TARGET_HELP = """TARGET is a TPU slice (v4, v5e, v5p or v6e with its chips: v5e:4x4, v5p:8x8x16),
a number of GPUs (h100, h200, b200: h200:8), or here: the local devices. A --mesh flag turns the
search off."""
"""Help text of targets and meshes."""


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Estimate whether a training step fits some hardware, how fast it is and what it costs."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    target: str = "here"
    """Hardware to plan for."""
    search: bool = True
    """Search over meshes, rematerialization and microbatches; False: keep the experiment's
    settings."""
    compile_best: Annotated[int, tyro.conf.arg(name="compile-best")] = 3
    """Compile up to this many of the best candidates, until one fits; 0: estimates only."""
    precisions: bool = True
    """Estimate the best candidate in each narrower precision too; precision changes training
    results."""
    measure: bool = True
    """With --target here, execute a few steps if they fit and are short."""
    tokens: float = 0.0
    """Training tokens for total time and price; 0: those of the experiment's steps."""
    prices: str = ""
    """TOML file with prices per chip hour; empty: the shipped list prices."""
    show: int = 8
    """Rows of the ranking to show."""


def main(arguments: list[str]) -> int:
    """Print a plan of an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    name = pop_positional(arguments, "CONFIG", "plan")
    with as_usage_errors():
        experiment, left = select_kinds(find_experiment(name), arguments)
        default, more = PlanArguments(experiment), f"{TARGET_HELP}\n\n{kinds_help(experiment)}"
        given = parse(PlanArguments, left, verb=f"plan {name}", default=default, extra_help=more)
    fixed = any(argument.startswith("--mesh.") for argument in left)

    from train.estimate.batch_shapes import resolve_sizes
    from train.estimate.expected_time import load_prices
    from train.estimate.plan import PlanOptions, make_plan
    from train.estimate.plan_tables import print_plan
    from train.estimate.target import parse_target

    load_prices(given.prices)  # before the devices are measured, and all else that takes a while
    options = PlanOptions(
        search=given.search and not fixed,
        compile_best=given.compile_best,
        precisions=given.precisions,
        measure=given.measure,
        tokens=given.tokens,
        prices=given.prices,
        show=given.show,
    )
    target = parse_target(given.target)
    experiment, notes = resolve_sizes(given.experiment)
    found = make_plan(experiment, target, options, notes)
    if json_wanted:
        print(json.dumps(found.as_dict()))
    else:
        print_plan(found)
    return 0

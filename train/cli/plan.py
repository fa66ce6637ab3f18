"""`python -m train plan CONFIG --target v5p:8x8x16 [--a.b.c VALUE ...]`."""

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

TARGET_HELP = """TARGET is a TPU slice (v4, v5e, v5p or v6e with its chips: v5e:4x4, v5p:8x8x16), a number
of GPUs (h100, h200, b200: h200:8), or here. With --mesh given, nothing is searched."""


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """Say whether a training step fits some hardware, how fast it is and what it costs."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    target: str = "here"
    """What to plan for."""
    search: bool = True
    """Try every mesh, rematerialisation and number of microbatches; else the experiment as it
    is."""
    compile_best: Annotated[int, tyro.conf.arg(name="compile-best")] = 3
    """Compile the real step of at most so many of the best, until one fits; 0: estimates alone."""
    precisions: bool = True
    """Estimate the best in each other precision too: they change what is learnt."""
    measure: bool = True
    """With --target here, run a few steps too, where they fit and are short."""
    tokens: float = 0.0
    """To train on, for the time and the price; 0: as many as the experiment does."""
    prices: str = ""
    """A TOML file with the price of a chip and hour; the list prices that are shipped if not
    given."""
    show: int = 8
    """Candidates of the ranking that are shown."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = pop_json_flag(arguments)
    name = pop_positional(arguments, "CONFIG", "plan")
    with as_usage_errors():
        experiment, left = select_kinds(find_experiment(name), arguments)
        default, more = PlanArguments(experiment), f"{TARGET_HELP}\n\n{kinds_help(experiment)}"
        given = parse(PlanArguments, left, verb=f"plan {name}", default=default, extra_help=more)
    fixed = any(argument.startswith("--mesh.") for argument in left)

    from train.estimate.batch_shapes import resolve_sizes
    from train.estimate.plan import PlanOptions, make_plan
    from train.estimate.plan_tables import print_plan
    from train.estimate.published import load_prices
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

"""`python -m train plan CONFIG --target v5p:8x8x16 [--a.b.c VALUE ...]`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import tyro

from train.cli.kinds import explained, with_kinds
from train.cli.parsing import parse, positional, settings_errors, wants_json
from train.experiment import Experiment
from train.registry import find

MORE = """TARGET is a TPU slice (v4, v5e, v5p or v6e with its chips: v5e:4x4, v5p:8x8x16), a number
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
    compile: Annotated[int, tyro.conf.arg(name="compile-best")] = 3
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
    json_wanted = wants_json(arguments)
    name = positional(arguments, "CONFIG", "plan")
    with settings_errors():
        experiment, left = with_kinds(find(name), arguments)
        default, more = PlanArguments(experiment), f"{MORE}\n\n{explained(experiment)}"
        given = parse(PlanArguments, left, verb=f"plan {name}", default=default, more=more)
    fixed = any(argument.startswith("--mesh.") for argument in left)

    from train.describe.shape import with_sizes
    from train.plan import Options, plan
    from train.plan.prices import prices
    from train.plan.tables import show
    from train.plan.target import parse_target

    prices(given.prices)  # before the devices are measured, and all else that takes a while
    options = Options(
        search=given.search and not fixed,
        compile=given.compile,
        precisions=given.precisions,
        measure=given.measure,
        tokens=given.tokens,
        prices=given.prices,
        show=given.show,
    )
    target = parse_target(given.target)
    experiment, notes = with_sizes(given.experiment)
    found = plan(experiment, target, options, notes)
    if json_wanted:
        print(json.dumps(found.as_dict()))
    else:
        show(found)
    return 0

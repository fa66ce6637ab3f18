"""`python -m train fit CONFIG --workdir W [--a.b.c VALUE ...]`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import tyro

from train.cli.kinds import explained, with_kinds
from train.cli.parsing import parse, positional, settings_errors, wants_json
from train.experiment import Experiment
from train.registry import find


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """Train; in a folder that has checkpoints, go on from the newest, bit for bit."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str = ""
    """The run's folder, local or remote; runs/NAME if not given."""
    quiet: bool = False
    """Show nothing on the way."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = wants_json(arguments)
    name = positional(arguments, "CONFIG", "fit")
    with settings_errors():
        experiment, left = with_kinds(find(name), arguments)
        default, more = FitArguments(experiment), explained(experiment)
        given = parse(FitArguments, left, verb=f"fit {name}", default=default, more=more)
    from train.loop import fit

    run = fit(given.experiment, given.workdir, quiet=given.quiet or json_wanted)
    if json_wanted:
        print(json.dumps({"workdir": str(run.folder.path), "step": run.step, **run.metrics}))
    return 0

"""`python -m train fit CONFIG --workdir W [--a.b.c VALUE ...]`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import Annotated

import tyro

from train.cli.parsing import (
    as_usage_errors,
    kinds_help,
    parse,
    pop_flag,
    pop_json_flag,
    pop_positional,
    select_kinds,
)
from train.config.registry import find_experiment
from train.experiment import Experiment

MESH_AUTO_HELP = "--mesh auto takes the mesh that `plan` finds best for the devices that are here."


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
    json_wanted = pop_json_flag(arguments)
    planned = pop_flag(arguments, "--mesh=auto") or _wants_auto(arguments)
    name = pop_positional(arguments, "CONFIG", "fit")
    with as_usage_errors():
        experiment, left = select_kinds(find_experiment(name), arguments)
        default, more = FitArguments(experiment), f"{MESH_AUTO_HELP}\n\n{kinds_help(experiment)}"
        given = parse(FitArguments, left, verb=f"fit {name}", default=default, extra_help=more)
    from train.loop import fit
    from train.parallel.distributed import explain_lost_peers, initialize_distributed
    from train.telemetry.goodput import process_start_time

    initialize_distributed()
    experiment = _planned(given) if planned else given.experiment
    with explain_lost_peers():
        quiet = given.quiet or json_wanted
        run = fit(experiment, given.workdir, quiet=quiet, start_time=process_start_time())
    if json_wanted:
        print(json.dumps({"workdir": str(run.folder.path), "step": run.step, **run.metrics}))
    return 0


def _wants_auto(arguments: list[str]) -> bool:
    """Takes `--mesh auto` out of the arguments, and tells whether it was there."""
    for index, pair in enumerate(itertools.pairwise(arguments)):
        if pair == ("--mesh", "auto"):
            del arguments[index : index + 2]
            return True
    return False


def _planned(given: FitArguments) -> Experiment:
    """On the mesh that suits the devices that are here."""
    from train.estimate.search import with_best_mesh
    from train.estimate.target import local_target

    experiment, candidate = with_best_mesh(given.experiment, local_target())
    if not given.quiet:
        print(f"mesh auto: {candidate.mesh_text()}; {candidate.flags()}", file=sys.stderr)
    return experiment

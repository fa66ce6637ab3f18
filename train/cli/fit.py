"""The verb `fit CONFIG --workdir W [--a.b.c VALUE ...]`."""

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

MESH_AUTO_HELP = "--mesh auto uses the best mesh for the local devices, as `plan` finds it."
"""Help text of `--mesh auto`."""


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """Train; a folder with checkpoints resumes exactly from the newest one."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str = ""
    """Folder of the run, local or remote; default: runs/NAME."""
    quiet: bool = False
    """Print no progress."""


def main(arguments: list[str]) -> int:
    """Train an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    mesh_auto = pop_flag(arguments, "--mesh=auto") or _pop_mesh_auto(arguments)
    name = pop_positional(arguments, "CONFIG", "fit")
    with as_usage_errors():
        experiment, left = select_kinds(find_experiment(name), arguments)
        default, more = FitArguments(experiment), f"{MESH_AUTO_HELP}\n\n{kinds_help(experiment)}"
        given = parse(FitArguments, left, verb=f"fit {name}", default=default, extra_help=more)
    from train.loop import fit
    from train.parallel.distributed import explain_lost_peers, initialize_distributed
    from train.telemetry.goodput import process_start_time

    initialize_distributed()
    experiment = _with_best_mesh(given) if mesh_auto else given.experiment
    with explain_lost_peers():
        quiet = given.quiet or json_wanted
        run = fit(experiment, given.workdir, quiet=quiet, start_time=process_start_time())
    if json_wanted:
        print(json.dumps({"workdir": str(run.folder.path), "step": run.step, **run.metrics}))
    return 0


def _pop_mesh_auto(arguments: list[str]) -> bool:
    """Remove `--mesh auto` from the arguments; return True if it was given."""
    for index, pair in enumerate(itertools.pairwise(arguments)):
        if pair == ("--mesh", "auto"):
            del arguments[index : index + 2]
            return True
    return False


def _with_best_mesh(given: FitArguments) -> Experiment:
    """Return the experiment on the best mesh for the local devices."""
    from train.estimate.search import with_best_mesh
    from train.estimate.target import local_target

    experiment, candidate = with_best_mesh(given.experiment, local_target())
    if not given.quiet:
        print(f"mesh auto: {candidate.mesh_text()}; {candidate.flags()}", file=sys.stderr)
    return experiment

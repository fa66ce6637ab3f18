"""Verbs over many runs: `sweep` and `scaling`.

What computes is imported inside the verbs, so that `--help` loads no JAX.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from train.cli.config_verbs import parse_config_verb
from train.cli.parsing import as_usage_errors, parse, pop_json_flag
from train.errors import UsageError
from train.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class SweepArguments:
    """Train a grid of settings with several seeds; the same command resumes."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str = ""
    """Folder of the sweep: a run folder for each run, sweep.json, results.json and sweep.png;
    default: runs/NAME-sweep."""
    seeds: int = 1
    """Runs of each setting, with the seeds from --seed on."""
    processes: int = 1
    """Runs at a time. On an accelerator, more than one share its memory."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        for name in ("seeds", "processes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: give 1 or more")


SWEEP_HELP = """--set FIELD=A,B,C sweeps a setting and may be repeated: every combination of values
is trained. FIELD is a dotted path as below, or its last name where that is unique."""
"""Help text of `--set`."""


def run_sweep(arguments: list[str]) -> int:
    """Train a grid of settings; print a table of them, best first; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    assignments = pop_option(arguments, "--set")

    def build(flags: Sequence[str]) -> SweepArguments:
        given = [*arguments, *flags]
        return parse_config_verb("sweep", given, lambda base: SweepArguments(base), SWEEP_HELP)

    given = build(())
    if not assignments and given.seeds == 1:
        raise UsageError("sweep: --set is missing; write --set FIELD=A,B, or --seeds N")
    from train.sweep import queue
    from train.sweep.figure import plot_sweep
    from train.sweep.folder import SweepFolder
    from train.sweep.grid import expand_grid, parse_grid
    from train.sweep.summary import print_summary, summarize

    grid = parse_grid(assignments, given.experiment)
    runs = expand_grid(grid, given.seeds, given.experiment, lambda flags: build(flags).experiment)
    workdir = given.workdir or f"runs/{given.experiment.name}-sweep"
    quiet = given.quiet or json_wanted
    results = queue.run_sweep(runs, workdir, processes=given.processes, quiet=quiet)
    summary, figure = summarize(runs, results), SweepFolder(workdir).figure
    drawn = plot_sweep(summary, figure)
    if json_wanted:
        print(json.dumps({"workdir": workdir, **summary.as_dict()}))
    else:
        print_summary(summary, f"{given.experiment.name}: {len(runs)} runs")
        if drawn:
            print(f"figure: {figure}")
    sys.stdout.flush()
    queue.check_results(results, workdir)
    return 0


def pop_option(arguments: list[str], name: str) -> list[str]:
    """Remove every `NAME VALUE` and `NAME=VALUE` from the arguments; return the values in order."""
    values, left = [], iter(arguments[:])
    arguments.clear()
    for each in left:
        option, equals, value = each.partition("=")
        if option != name:
            arguments.append(each)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{name}: has no value; write {name} FIELD=A,B")
        values.append(value)
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Settings of the fits."""

    budget: str = ""
    """Training FLOPs to find the compute-optimal model for; several are separated by commas."""
    bootstrap_samples: int = 200
    """Resamples of the runs behind the 95% intervals."""
    workdir: str = ""
    """Folder of the figure and of the fits as JSON (and of the runs, where they are trained)."""

    def __post_init__(self) -> None:
        if self.bootstrap_samples < 2:
            raise UsageError(f"bootstrap_samples {self.bootstrap_samples}: give 2 or more")

    def budgets(self) -> list[float]:
        """Return the budgets as numbers."""
        from train.scaling.numbers import parse_counts

        return parse_counts(self.budget, "--budget") if self.budget else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvArguments(FitOptions):
    """Fit scaling laws to the runs in a CSV file with the columns parameters, tokens and loss."""

    from_csv: str
    """The file: parameters without embeddings, training tokens, held-out loss in nats a token."""


def run_scaling(arguments: list[str]) -> int:
    """Fit scaling laws to new runs or to a CSV; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    if not any(each.partition("=")[0] == "--from-csv" for each in arguments):
        raise UsageError("scaling: --from-csv is missing")
    with as_usage_errors():
        given = parse(CsvArguments, arguments, verb="scaling")
    return _fit_csv(given, json_wanted)


def _fit_csv(given: CsvArguments, json_wanted: bool) -> int:
    """Fit the runs of a file, and print the fits."""
    from train.scaling.analysis import fit_csv
    from train.scaling.tables import print_analysis

    analysis = fit_csv(given.from_csv, given.budgets(), given.bootstrap_samples)
    found = analysis.as_dict()
    if given.workdir:
        from train.scaling.report import write_report

        write_report(analysis, given.workdir)
    if json_wanted:
        print(json.dumps(found))
    else:
        print_analysis(analysis)
    return 0

"""Verbs over many runs: `sweep` and `scaling`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro

from train.cli.config_verbs import ConfigArguments, StartArguments, parse_config_verb
from train.cli.parsing import JsonArguments, given_flags, parse, print_json
from train.errors import UsageError, UserError
from train.run_folder.folder import RunFolder
from train.scaling.analysis import analyze, read_csv
from train.scaling.design import (
    LearningRateRule,
    SizedRun,
    SizeRules,
    design_runs,
    model_of_size,
    model_of_width,
    parse_counts,
    resolve_rule,
)
from train.scaling.scaling_report import (
    check_design,
    design_as_dicts,
    finished_runs,
    fit_results,
    print_analysis,
    print_design,
    write_report,
    write_runs,
)
from train.sweep import queue
from train.sweep.grid import NO_WARM_START, SweepRun, expand_grid, parse_grid
from train.sweep.summary import plot_sweep, print_summary, summarize
from train.sweep.sweep_folder import RunResult, SweepFolder
from train.warm_start.word_vectors import is_word_vector_file
from transformer.validation import Bounds, NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueArguments(ConfigArguments):
    """Settings of the queue that trains the runs."""

    workdir: str = ""
    """Folder of the runs and their results; default: runs/NAME-sweep, or runs/NAME-scaling."""
    seeds: PositiveInt = 1
    """Runs of each setting, with the seeds from --seed on."""
    processes: PositiveInt = 1
    """Runs at a time. On an accelerator, more than one share its memory."""
    minutes: NonNegativeFloat = 0.0
    """Stop after this time with checkpoints saved, as a signal would; 0: no limit."""
    quiet: bool = False
    """Show no progress."""

    def train(self, runs: Sequence[SweepRun], workdir: str) -> dict[str, RunResult]:
        """Train the runs in the queue."""
        return queue.run_sweep(
            runs,
            workdir,
            processes=self.processes,
            limit_seconds=60 * self.minutes,
            quiet=self.quiet or self.json,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArguments(QueueArguments, StartArguments):
    """Train a grid of settings with several seeds; the same command resumes."""

    set: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FIELD=A,B,C")
    ] = ()
    """Sweep a setting; may be repeated: every combination of values is trained. FIELD is the dotted
    path of a setting, or its last name where that is unique."""


def run_sweep(arguments: list[str]) -> int:
    """Train a grid of settings; print a table of them, best first; return the exit status."""

    def build(flags: Sequence[str]) -> SweepArguments:
        return parse_config_verb("sweep", [*arguments, *flags], SweepArguments)

    options = build(())
    if not options.set and options.seeds == 1:
        raise UsageError("sweep: --set is missing; write --set FIELD=A,B, or --seeds N")
    if options.init_from and not is_word_vector_file(options.init_from):
        # A wrong folder would fail every run.
        RunFolder.open_existing(options.init_from, "init_from")
    grid = parse_grid(options.set, options.experiment)
    grid_runs = expand_grid(
        grid, options.seeds, options.experiment, lambda flags: build(flags).experiment
    )
    start = {name: getattr(options, name) for name in NO_WARM_START}
    runs = [dataclasses.replace(run, warm_start=start) for run in grid_runs]
    workdir = options.workdir or f"runs/{options.experiment.name}-sweep"
    results = options.train(runs, workdir)
    summary, figure = summarize(runs, results), SweepFolder(workdir).figure
    if options.json:
        print_json({"workdir": workdir, **summary.as_dict()})
    else:
        print_summary(summary, f"{options.experiment.name}: {len(runs)} runs")
    if plot_sweep(summary, figure) and not options.json:
        print(f"figure: {figure}", flush=True)
    queue.check_results(results, workdir)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(JsonArguments):
    """Settings of the fits."""

    budget: str = ""
    """Training FLOPs to find the compute-optimal model for; several are separated by commas."""
    bootstrap_samples: Annotated[int, Bounds(2)] = 200
    """Resamples of the runs behind the 95% intervals."""

    def budgets(self) -> list[float]:
        """Return the budgets as numbers."""
        return parse_counts(self.budget, "--budget") if self.budget else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvArguments(FitOptions):
    """Fit scaling laws to the runs in a CSV file with the columns parameters, tokens and loss."""

    from_csv: str
    """The file: parameters without embeddings, training tokens, held-out loss in nats a token."""
    workdir: str = ""
    """Folder of the figure and of the fits as JSON; default: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingArguments(QueueArguments, FitOptions):
    """Train models of several sizes on several numbers of tokens, and fit scaling laws."""

    sizes: str = ""
    """Parameters without embeddings, as 100k,300k,1M: the closest model of each is trained."""
    widths: str = ""
    """D of the models, as 64,128,256; instead of --sizes."""
    tokens: str = ""
    """Training tokens, as 500k,1M,2M: every model is trained on each."""
    flops: str = ""
    """Training FLOPs, as 1e12,4e12: every model is trained for each (isoFLOP)."""
    lr_rule: LearningRateRule = "auto"
    """Learning rate at width D, from that of CONFIG at its own: mup, inverse_sqrt_width or
    constant. auto: mup for adam and adamw, constant for muon."""
    aspect_ratio: NonNegativeFloat = 0.0
    """D over the number of layers; 0: that of CONFIG."""
    min_steps: PositiveInt = 100
    """Steps below which a run has smaller batches."""
    dry_run: bool = False
    """Print the runs and train none."""


def run_scaling(arguments: list[str]) -> int:
    """Fit scaling laws to new runs or to a CSV; return the exit status."""
    if "from_csv" in given_flags(arguments):
        return _fit_csv(parse(CsvArguments, arguments, verb="scaling"))
    return _run_scaling_sweep(parse_config_verb("scaling", arguments, ScalingArguments))


def _run_scaling_sweep(options: ScalingArguments) -> int:
    """Train the runs of a design, fit them, and print the fits."""
    budgets = options.budgets()
    sized = _design(options)
    check_design(sized)
    if options.dry_run:
        if options.json:
            print_json({"sweep": design_as_dicts(sized)})
        else:
            print_design(sized)
        return 0
    workdir = options.workdir or f"runs/{options.experiment.name}-scaling"
    results = options.train([each.run for each in sized], workdir)
    if not options.json:
        print_design(sized, results)
    write_runs(finished_runs(sized, results), workdir)
    analysis = fit_results(
        sized, results, budgets=budgets, bootstrap_samples=options.bootstrap_samples
    )
    figure = write_report(analysis, workdir)
    if options.json:
        rule = resolve_rule(options.lr_rule, options.experiment)
        detail = {"workdir": workdir, "lr_rule": rule, "sweep": design_as_dicts(sized, results)}
        print_json({**analysis.as_dict(), **detail})
    else:
        print_analysis(analysis)
        print(f"figure: {figure}", flush=True)
    queue.check_results(results, workdir)
    return 0


def _design(options: ScalingArguments) -> list[SizedRun]:
    """Return the runs that the flags describe."""
    if bool(options.sizes) == bool(options.widths):
        raise UsageError("scaling: give either --sizes or --widths, as --sizes 100k,300k,1M")
    if not options.tokens and not options.flops:
        raise UsageError("scaling: --tokens is missing; write --tokens 1M,4M, or --flops 1e12,4e12")
    tokens = parse_counts(options.tokens, "--tokens") if options.tokens else []
    budgets = parse_counts(options.flops, "--flops") if options.flops else []
    # Shapes are counted here. The accelerator is for the processes that train.
    jax.config.update("jax_platforms", "cpu")
    base = options.experiment
    rules = SizeRules(options.lr_rule, options.aspect_ratio, options.min_steps)
    if options.sizes:
        sizes = parse_counts(options.sizes, "--sizes")
        models = [model_of_size(base.model, size, rules) for size in sizes]
    else:
        widths = parse_counts(options.widths, "--widths")
        models = [model_of_width(base.model, round(width), rules) for width in widths]
    # Small sizes may have the same closest model.
    models = list(dict.fromkeys(models))
    return design_runs(
        base, models, tokens=tokens, budgets=budgets, seeds=options.seeds, rules=rules
    )


def _fit_csv(options: CsvArguments) -> int:
    """Fit the runs of a file, and print the fits."""
    runs, samples = read_csv(options.from_csv), options.bootstrap_samples
    try:
        analysis = analyze(runs, budgets=options.budgets(), bootstrap_samples=samples)
    except ValueError as error:
        raise UserError(f"{options.from_csv}: {error}") from error
    if options.workdir:
        write_report(analysis, options.workdir)
    if options.json:
        print_json(analysis.as_dict())
    else:
        print_analysis(analysis)
    return 0

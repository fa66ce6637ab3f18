"""Verbs without a CONFIG that inspect a run or this machine.

What computes is imported inside the verbs, so that `VERB --help` loads no JAX.
"""

import dataclasses

from train.cli.parsing import parse, pop_json_flag, pop_positional, print_json
from train.errors import UsageError, UserError


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


def run_evaluate(arguments: list[str]) -> int:
    """Print a run's metrics; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "evaluate")
    options = parse(EvaluateArguments, arguments, verb="evaluate W")
    from train.assembly import make_task
    from train.run import load

    run = load(workdir, step=options.step, average_checkpoints=options.average_checkpoints)
    metrics, notes = run.evaluate(options.split), make_task(run.experiment).metric_notes
    if json_wanted:
        print_json({"step": run.step, "split": options.split, **metrics, **notes})
    else:
        for name, value in metrics.items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        for name, text in notes.items():
            print(f"{name.replace('_', ' ')}: {text}")
    return 0


@dataclasses.dataclass(frozen=True)
class GoodputArguments:
    """Print how a run's time was spent, over all its processes, including a running one."""


def run_goodput(arguments: list[str]) -> int:
    """Print a run's goodput; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "goodput")
    parse(GoodputArguments, arguments, verb="goodput W")
    from train.run_folder.folder import RunFolder
    from train.telemetry.goodput import (
        ACTIVITY_DESCRIPTIONS,
        compute_goodput,
        format_duration,
        read_time_records,
    )

    folder = RunFolder.open_existing(workdir)
    records = read_time_records(folder.time_log)
    if not records:
        raise UserError(f"{folder.time_log}: is empty; fit writes it from its first step on")
    goodput = compute_goodput(records)
    if json_wanted:
        plain = dataclasses.asdict(goodput) | {
            "total": goodput.total,
            "share": goodput.productive_fraction,
        }
        print_json(plain)
        return 0
    for activity, seconds in goodput.seconds.items():
        print(
            f"{activity:9} {seconds / (goodput.total or 1):6.1%} "
            f"{format_duration(seconds):>12}   {ACTIVITY_DESCRIPTIONS[activity]}"
        )
    print(f"{'all':9} {1:6.1%} {format_duration(goodput.total):>12}   starts: {goodput.starts}")
    return 0


def run_doctor(arguments: list[str]) -> int:
    """Print a report of this machine; return 1 if it has a problem."""
    from train.doctor.report import run_checks

    json_wanted = pop_json_flag(arguments)
    if arguments:
        raise UsageError(f"doctor {arguments[0]}: takes no arguments but --json; leave it out")
    report = run_checks()
    if json_wanted:
        print_json(report.as_dict())
    else:
        report.print()
    return 0 if report.ok else 1


@dataclasses.dataclass(frozen=True)
class AttentionArguments:
    """Write a page that shows every attention head of a run's model over a text."""

    text: str
    """Text that the model reads; of a translation model, the source."""
    output: str
    """File to write: .html for the interactive page; .png, .pdf or .svg for a figure."""
    target: str | None = None
    """Translation that the decoder reads; default: the model's own translation."""
    layer: int | None = None
    """Layer to open first; default: the first with weights."""
    head: int = 0
    """Head to open first."""
    one_head: bool = False
    """Draw only that layer and head in a figure, with its tokens."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_attention(arguments: list[str]) -> int:
    """Write the attention of a run's model over a text; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "attention")
    options = parse(AttentionArguments, arguments, verb="attention W")
    from train.run import load
    from train.visualization.attention_view import FIGURE_FORMATS, bad_output, view_attention

    is_figure = options.output.endswith(FIGURE_FORMATS)
    if not is_figure and not options.output.endswith(".html"):
        raise bad_output(options.output)
    if options.one_head and not is_figure:
        raise UsageError("--one-head: is for figures; give an --output that ends with .png")
    run = load(workdir, step=options.step)
    view = view_attention(run, options.text, options.target, layer=options.layer, head=options.head)
    view.save(options.output, one_head=options.one_head)
    if json_wanted:
        heads = sum(each.weights.shape[1] for each in view.maps)
        print_json({"output": options.output, "stages": view.stages, "heads": heads})
    else:
        print(f"wrote {options.output}: {view.subtitle}")
    return 0


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Write a page of a run, or of several compared."""

    output: str
    """File to write, ending with .html."""


def run_report(arguments: list[str]) -> int:
    """Write the report of runs; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdirs = [pop_positional(arguments, "W", "report")]
    while arguments and not arguments[0].startswith("-"):
        workdirs.append(arguments.pop(0))
    options = parse(ReportArguments, arguments, verb="report W")
    from train.visualization.run_report import RunReport

    report = RunReport(workdirs)
    report.save(options.output)
    if json_wanted:
        summaries = {run["label"]: run["summary"] for run in report.runs}
        print_json({"output": options.output, "runs": summaries})
    else:
        print(f"wrote {options.output}: {report.title}")
    return 0

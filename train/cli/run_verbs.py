"""Verbs without a CONFIG that inspect a run or this machine."""

import dataclasses
from typing import Annotated

import tyro

from train.assembly import make_task
from train.cli.parsing import JsonArguments, RunArguments, Workdir, parse, print_json
from train.doctor.report import run_checks
from train.errors import UsageError, UserError
from train.run import load
from train.run_folder.folder import RunFolder
from train.telemetry.goodput import (
    ACTIVITY_DESCRIPTIONS,
    compute_goodput,
    format_duration,
    read_time_records,
)
from train.visualization.attention_view import FIGURE_FORMATS, bad_output, view_attention
from train.visualization.run_report import RunReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments(RunArguments):
    """Print the metrics of a run on a whole split of its data."""

    split: str = "validation"
    """Split to evaluate: train, validation, or test if the data have one."""
    average_checkpoints: int | None = None
    """Average the weights of this many checkpoints: the selected one and those before it."""


def run_evaluate(arguments: list[str]) -> int:
    """Print a run's metrics; return the exit status."""
    options = parse(EvaluateArguments, arguments, verb="evaluate")
    run = load(options.workdir, step=options.step, average_checkpoints=options.average_checkpoints)
    metrics, notes = run.evaluate(options.split), make_task(run.experiment).metric_notes
    if options.json:
        print_json({"step": run.step, "split": options.split, **metrics, **notes})
    else:
        for name, value in metrics.items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        for name, text in notes.items():
            print(f"{name.replace('_', ' ')}: {text}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputArguments(JsonArguments):
    """Print how a run's time was spent, over all its processes, including a running one."""

    workdir: Workdir
    """Folder of the run."""


def run_goodput(arguments: list[str]) -> int:
    """Print a run's goodput; return the exit status."""
    options = parse(GoodputArguments, arguments, verb="goodput")
    folder = RunFolder.open_existing(options.workdir)
    records = read_time_records(folder.time_log)
    if not records:
        raise UserError(f"{folder.time_log}: is empty; fit writes it from its first step on")
    goodput = compute_goodput(records)
    if options.json:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArguments(JsonArguments):
    """Report this machine's hardware and versions, and problems with them."""


def run_doctor(arguments: list[str]) -> int:
    """Print a report of this machine; return 1 if it has a problem."""
    options = parse(DoctorArguments, arguments, verb="doctor")
    report = run_checks()
    if options.json:
        print_json(report.as_dict())
    else:
        report.print()
    return 0 if report.ok else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionArguments(RunArguments):
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


def run_attention(arguments: list[str]) -> int:
    """Write the attention of a run's model over a text; return the exit status."""
    options = parse(AttentionArguments, arguments, verb="attention")
    is_figure = options.output.endswith(FIGURE_FORMATS)
    if not is_figure and not options.output.endswith(".html"):
        raise bad_output(options.output)
    if options.one_head and not is_figure:
        raise UsageError("--one-head: is for figures; give an --output that ends with .png")
    run = load(options.workdir, step=options.step)
    view = view_attention(run, options.text, options.target, layer=options.layer, head=options.head)
    view.save(options.output, one_head=options.one_head)
    if options.json:
        heads = sum(each.weights.shape[1] for each in view.maps)
        print_json({"output": options.output, "stages": view.stages, "heads": heads})
    else:
        print(f"wrote {options.output}: {view.subtitle}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArguments(JsonArguments):
    """Write a page of a run, or of several compared."""

    workdirs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="W [W2 ...]")]
    """Folders of the runs."""

    output: str
    """File to write, ending with .html."""


def run_report(arguments: list[str]) -> int:
    """Write the report of runs; return the exit status."""
    options = parse(ReportArguments, arguments, verb="report")
    if not options.workdirs:
        raise UsageError("report: W is missing; give the folders of runs")
    report = RunReport(list(options.workdirs))
    report.save(options.output)
    if options.json:
        summaries = {run["label"]: run["summary"] for run in report.runs}
        print_json({"output": options.output, "runs": summaries})
    else:
        print(f"wrote {options.output}: {report.title}")
    return 0

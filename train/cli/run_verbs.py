"""Verbs that inspect a run."""

import dataclasses
from typing import Annotated

import tyro
from rich.console import Console

from train.assembly import make_task
from train.cli.parsing import JsonArguments, RunArguments, Workdir, parse, print_json
from train.errors import UsageError, UserError
from train.run import load
from train.run_folder.folder import RunFolder
from train.telemetry.goodput import compute_goodput, goodput_table, read_time_records
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
    run = load(
        options.workdir,
        step=options.step,
        average_checkpoints=options.average_checkpoints,
        quantize=options.quantize,
    )
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
    time_log = RunFolder.open_existing(options.workdir).time_log
    records = read_time_records(time_log)
    if not records:
        raise UserError(f"{time_log}: is empty; fit writes it from its first step on")
    goodput = compute_goodput(records)
    if options.json:
        share = {"total": goodput.total, "share": goodput.productive_fraction}
        print_json(dataclasses.asdict(goodput) | share)
    else:
        Console().print(goodput_table(goodput))
    return 0


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
    run = load(options.workdir, step=options.step, quantize=options.quantize)
    view = view_attention(run, options.text, options.target, layer=options.layer, head=options.head)
    view.save(options.output, one_head=options.one_head)
    heads = sum(each.weights.shape[1] for each in view.maps)
    record = {"output": options.output, "stages": view.stages, "heads": heads}
    options.show(record, f"wrote {options.output}: {view.subtitle}")
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
    summaries = {run["label"]: run["summary"] for run in report.runs}
    record = {"output": options.output, "runs": summaries}
    options.show(record, f"wrote {options.output}: {report.title}")
    return 0

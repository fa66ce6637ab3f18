"""Verbs that write pages and figures: `attention` and `report`.

What computes is imported inside the verbs, so that `VERB --help` loads no JAX.
"""

import dataclasses
import json

from train.cli.parsing import parse, pop_json_flag, pop_positional
from train.errors import UsageError


@dataclasses.dataclass(frozen=True)
class AttentionArguments:
    """Write a page that shows every attention head of a run's model over a text."""

    text: str
    """Text that the model reads; of a translation model, the source."""
    output: str
    """File to write: .html for the interactive page; .png, .pdf or .svg for a figure."""
    target: str | None = None
    """Translation that the decoder reads; default: the model's own translation."""
    layer: int = 0
    """Layer to open first."""
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
    given = parse(AttentionArguments, arguments, verb="attention W")
    from train.run import load
    from train.visualization.attention_view import FIGURE_FORMATS, bad_output, view_attention

    is_figure = given.output.endswith(FIGURE_FORMATS)
    if not is_figure and not given.output.endswith(".html"):
        raise bad_output(given.output)
    if given.one_head and not is_figure:
        raise UsageError("--one-head: is for figures; give an --output that ends with .png")
    run = load(workdir, step=given.step)
    view = view_attention(run, given.text, given.target, layer=given.layer, head=given.head)
    view.save(given.output, one_head=given.one_head)
    if json_wanted:
        heads = sum(each.weights.shape[1] for each in view.maps)
        print(json.dumps({"output": given.output, "stages": view.stages, "heads": heads}))
    else:
        print(f"wrote {given.output}: {view.subtitle}")
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
    given = parse(ReportArguments, arguments, verb="report W")
    from train.visualization.run_report import RunReport

    report = RunReport(workdirs)
    report.save(given.output)
    if json_wanted:
        summaries = {run["label"]: run["summary"] for run in report.runs}
        print(json.dumps({"output": given.output, "runs": summaries}))
    else:
        print(f"wrote {given.output}: {report.title}")
    return 0

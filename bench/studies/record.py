"""The harness of studies: train what is missing, keep results, write the page.

A study is its question, its grid of runs, its table and its figure. It writes NAME.md, NAME.json
and NAME.png to docs/results, and its finished runs to docs/results/runs/NAME.jsonl
(`FinishedRuns`): the same command goes on where it stopped, also on another machine, and with
everything trained it only writes the page again.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from bench.command import save_figure
from bench.machine import commit, machine
from bench.studies.finished_runs import FinishedRuns, compared_fields
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.runtime.signals import PreemptedError
from train.sweep.grid import SweepRun, run_name
from train.sweep.queue import check_results, run_sweep
from train.sweep.sweep_folder import RunResult, SweepFolder

Measure = Callable[[SweepRun, Path], Mapping[str, Any]]
"""Returns what a study reads from a run and its folder, as a few plain numbers."""


@dataclasses.dataclass(frozen=True)
class Queue:
    """Where and how long a study trains."""

    workdir: Path | None = None
    """Folder of the runs. Without it: runs/STUDY."""
    output: Path = Path("docs/results")
    """Folder of the page."""
    processes: int = 1
    """Runs at once."""
    minutes: float = 0
    """Time after which the command stops, and can be repeated to go on. 0: no limit."""


QueueFlags = tyro.conf.OmitArgPrefixes[Queue]
"""The settings of a queue as flags of their own: `--minutes`, not `--queue.minutes`."""
NO_LIMIT = Queue()


@dataclasses.dataclass(frozen=True)
class Page:
    """What a study writes. The first screen answers the question, the rest says how."""

    title: str
    question: str
    answer: str
    table: str  # Markdown, as `markdown_table` makes it
    settings: str
    more: Sequence[str] = ()
    """Further paragraphs and tables."""


class Study:
    """The runs of a study, their results, and its page."""

    def __init__(self, name: str, queue: Queue) -> None:
        """Read the finished runs."""
        self.name = name
        self.queue = queue
        self.workdir = queue.workdir or Path("runs") / name
        self.records = FinishedRuns(queue.output / "runs" / f"{name}.jsonl")
        self.results: dict[str, RunResult] = {}
        """All results by the runs' settings: parts may share runs, and name them differently."""
        self.runs: list[SweepRun] = []
        self.trained_now = False

    def train(
        self,
        runs: Sequence[SweepRun],
        *,
        part: str = "",
        measure: Measure | None = None,
        accept_failed: bool = False,
        minutes: float | None = None,
    ) -> dict[str, RunResult]:
        """Train the runs that are missing; return the results of all by name.

        Args:
          runs: Runs of the study, or of one part of it.
          part: Folder below the study's own.
          measure: What is read from each run that finished.
          accept_failed: A run that diverges is a result, not an error.
          minutes: In place of the queue's.

        Raises:
          PreemptedError: The time is over, or a signal arrived. The same command resumes.
          UserError: A run failed.
        """
        workdir = self.workdir / part
        found = {run.name: self.records.find(run) for run in runs}
        known = {name: each.result for name, each in found.items() if each is not None}
        self.trained_now |= len(known) < len(runs)

        def record(results: Mapping[str, RunResult]) -> None:
            for run in runs:
                result = results.get(run.name)
                if result is None or run.name in known or not _is_final(result, accept_failed):
                    continue
                finished = result.status == "finished"
                numbers = measure(run, workdir / run.name) if measure and finished else {}
                self.records.add(run, result, numbers)

        seconds = 60 * (self.queue.minutes if minutes is None else minutes)
        options: dict[str, Any] = {"processes": self.queue.processes, "limit_seconds": seconds}
        try:
            results = run_sweep(runs, str(workdir), **options, known=known)
        except PreemptedError:
            record(SweepFolder(str(workdir)).read_results())
            raise
        record(results)
        if not accept_failed:
            check_results(results, str(workdir))
        self.runs += runs
        for run in runs:
            self.results[json.dumps(compared_fields(run.experiment))] = results[run.name]
        return results

    def measured(self, run: SweepRun) -> Mapping[str, Any]:
        """Return what was read from a finished run."""
        found = self.records.find(run)
        assert found is not None, run.name
        return found.measured

    def write(self, page: Page, figure: Figure, data: Mapping[str, Any]) -> None:
        """Write the page, the figure, and numbers with command, commit, hardware and time."""
        trained_on = self.records.describe_machines(self.runs)
        seconds = round(sum(each.seconds for each in self.results.values()))
        where = {"trained on": trained_on} if trained_on else {}
        file = self.queue.output / f"{self.name}.json"
        record = {**where, "runs": len(self.results), "seconds": seconds}
        write_page(file, page, figure, record, data, keep_origin=not self.trained_now)


def _is_final(result: RunResult, accept_failed: bool) -> bool:
    """Return True if the run would end in the same way again."""
    # A process that was killed says nothing about the run.
    diverged = result.status == "failed" and not result.error.startswith("its process")
    return result.status == "finished" or (accept_failed and diverged)


def write_page(
    file: Path,
    page: Page,
    figure: Figure,
    record: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    keep_origin: bool,
) -> None:
    """Write NAME.json, and NAME.md and NAME.png beside it.

    Args:
      file: The JSON file.
      page: Text of the page.
      figure: The figure.
      record: Number of runs and their time.
      data: Numbers for the JSON file.
      keep_origin: Nothing was trained now: commit and hardware are those of the last page.
    """
    name, folder = file.stem, file.parent
    command = " ".join([f"python -m bench.studies.{name}", *shown_arguments(sys.argv[1:])])
    origin: dict[str, Any] = {"command": command, "commit": commit(), **machine()}
    if keep_origin and file.exists():
        before = json.loads(file.read_text())
        origin = {key: before[key] for key in ("commit", *machine()) if key in before}
        origin = {"command": command, **origin}
    save_figure(figure, folder / f"{name}.png")
    record = {**origin, **record}
    hours = f"{record['seconds'] / 3600:.1f} hours"
    trained_on = record.get("trained on", origin.get("gpu", origin.get("cpu", "")))
    source = f"commit {record['commit']}. Numbers: [{file.name}]({file.name})."
    text = [
        f"# {page.title}",
        f"**{page.question}**",
        page.answer,
        page.table,
        f"![{page.title}]({name}.png)",
        "## Settings",
        page.settings,
        f"`{command}`: {record['runs']} runs, {hours}, {trained_on}, {source}",
        *page.more,
    ]
    (folder / f"{name}.md").write_text("\n\n".join(text) + "\n")
    file.write_text(json.dumps({**record, **data}, indent=1) + "\n")


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that decide what a study finds, without paths of this machine."""
    shown, values = [], iter(arguments)
    for each in values:
        flag, equals, _ = each.partition("=")
        if flag in ("--workdir", "--output", "--minutes", "--processes"):
            if not equals:
                next(values, None)
        elif flag == "--data":
            shown += [flag, "DATA"]
            if not equals:
                next(values, None)
        else:
            shown.append(each)
    return shown


def sweep_run(settings: Mapping[str, str], experiment: Experiment, name: str = "") -> SweepRun:
    """Return a run of a study, named after its settings and its seed."""
    model = experiment.model
    batch_size = experiment.batch_size or 1
    tokens = experiment.steps * batch_size * experiment.sequence_length
    cost = float(tokens * (model.num_layers * model.d_model + 1000))
    return SweepRun(name or run_name(settings, experiment.seed), settings, experiment, cost)


def at_the_end(experiment: Experiment, seed: int, **evaluation: Any) -> Experiment:
    """Return the experiment with a seed, evaluated at its end only."""
    return dataclasses.replace(
        experiment,
        seed=seed,
        evaluation=EvaluationConfig(every=0, **evaluation),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def over_seeds(values: Sequence[float] | np.ndarray, digits: int) -> str:
    """Return the mean, and of several seeds the standard deviation: `4.21 ± 0.03`."""
    found = np.asarray(values, float)
    spread = f" ± {found.std(ddof=1):.{digits}f}" if len(found) > 1 else ""
    return f"{found.mean():.{digits}f}{spread}"


def seeds_of(count: int) -> str:
    """Return `one seed` or `3 seeds: mean and standard deviation`."""
    return "one seed" if count == 1 else f"{count} seeds: mean and standard deviation"

"""The harness of studies: train what is missing, keep results, write tables, numbers and figure.

A study is its question, its grid of runs, its tables and its figure. It writes NAME.json, NAME.png
and the tables of NAME.md to docs/results, and its finished runs to docs/results/runs/NAME.jsonl
(`FinishedRuns`): the same command goes on where it stopped, also on another machine, and with
everything trained it only writes the results again.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.results import save_figure
from bench.studies.finished_runs import FinishedRun, FinishedRuns, compared_fields
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.runtime.signals import PreemptedError
from train.sweep.grid import SweepRun, run_name
from train.sweep.queue import check_results, run_sweep
from train.sweep.sweep_folder import RunResult, SweepFolder

RESULTS = Path("docs/results")

Measure = Callable[[SweepRun, Path], Mapping[str, Any]]
"""Returns what a study reads from a run and its folder, as a few plain numbers."""


class Study:
    """The runs of a study and their results."""

    def __init__(self, name: str, minutes: float) -> None:
        """Read the finished runs.

        Args:
          name: Name of the study.
          minutes: Time after which `train` stops. 0: no limit.
        """
        self.name = name
        self.minutes = minutes
        self.workdir = Path("runs") / name
        self.records = FinishedRuns(RESULTS / "runs" / f"{name}.jsonl")
        self.finished: dict[str, FinishedRun] = {}
        """All runs by their settings: parts may share runs, and name them differently."""

    def train(
        self,
        runs: Sequence[SweepRun],
        *,
        part: str = "",
        measure: Measure | None = None,
        accept_failed: bool = False,
        minutes: float | None = None,
    ) -> dict[str, FinishedRun]:
        """Train the runs that are missing; return all by name.

        Args:
          runs: Runs of the study, or of one part of it.
          part: Folder below the study's own.
          measure: What is read from each run that finished.
          accept_failed: A run that diverges is a result, not an error.
          minutes: In place of the study's.

        Raises:
          PreemptedError: The time is over, or a signal arrived. The same command resumes.
          UserError: A run failed.
        """
        workdir = self.workdir / part
        found = {run.name: each for run in runs if (each := self.records.find(run))}
        missing = [run for run in runs if run.name not in found]

        def record(results: Mapping[str, RunResult]) -> None:
            for run in missing:
                result = results.get(run.name)
                if result is None or not _is_final(result, accept_failed):
                    continue
                finished = result.status == "finished"
                numbers = measure(run, workdir / run.name) if measure and finished else {}
                found[run.name] = self.records.add(run, result, numbers)

        seconds = 60 * (self.minutes if minutes is None else minutes)
        known = {name: each.result for name, each in found.items()}
        try:
            results = run_sweep(runs, str(workdir), limit_seconds=seconds, known=known)
        except PreemptedError:
            record(SweepFolder(str(workdir)).read_results())
            raise
        record(results)
        others = {name: each for name, each in results.items() if name not in found}
        check_results(others, str(workdir))
        for run in runs:
            self.finished[json.dumps(compared_fields(run))] = found[run.name]
        return found

    def write(self, tables: Sequence[str], figure: Figure, data: Mapping[str, Any]) -> None:
        """Write the numbers, the figure, and the tables in place of those of the page."""
        finished = self.finished.values()
        machines = Counter(each.machine or "not recorded" for each in finished)
        record = {
            "trained on": ", ".join(f"{name} ({n})" for name, n in machines.most_common()),
            "runs": len(finished),
            "seconds": round(sum(each.result.seconds for each in finished)),
        }
        (RESULTS / f"{self.name}.json").write_text(json.dumps({**record, **data}, indent=1) + "\n")
        save_figure(figure, RESULTS / f"{self.name}.png")
        page = RESULTS / f"{self.name}.md"
        text = page.read_text() if page.exists() else ""
        for table in tables:
            text = with_table(text, table)
        page.write_text(text)


def _is_final(result: RunResult, accept_failed: bool) -> bool:
    """Return True if the run would end in the same way again."""
    # A process that was killed says nothing about the run.
    diverged = result.status == "failed" and not result.error.startswith("its process")
    return result.status == "finished" or (accept_failed and diverged)


def with_table(page: str, table: str) -> str:
    """Return a page with a table in place of the one with the same header, or at its end."""
    header = table.split("\n")[0]
    before, found, after = page.partition(f"{header}\n")
    if not found:
        return f"{page}\n{table}\n"
    _, gap, rest = after.partition("\n\n")
    return f"{before}{table}{gap}{rest}" if gap else f"{before}{table}\n"


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

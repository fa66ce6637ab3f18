"""Records of studies in docs/results: figure, table, and how they were produced."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from bench.machine import commit, machine
from bench.studies.finished_runs import FinishedRuns, compared_fields
from train.errors import UserError
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError
from train.sweep.grid import SweepRun
from train.sweep.queue import check_results, run_sweep
from train.sweep.sweep_folder import RunResult, SweepFolder

RESULTS = Path("docs/results")


def open_records(study: str, output: Path) -> FinishedRuns:
    """Return the finished runs of a study, by the folder that its page is written to."""
    return FinishedRuns(output / "runs" / f"{study}.jsonl")


Measure = Callable[[SweepRun, Path], Mapping[str, Any]]
"""Returns what a study reads from a run and its folder, as a few plain numbers."""


def train_all(
    runs: Sequence[SweepRun],
    workdir: Path,
    records: FinishedRuns,
    *,
    measure: Measure | None = None,
    accept_failed: bool = False,
    processes: int = 1,
    minutes: float = 0,
) -> dict[str, RunResult]:
    """Train the runs on the queue of a folder; return their results.

    Raises:
      PreemptedError: The time is over, or a signal arrived. The same command resumes.
      UserError: A run failed.
    """
    found = {run.name: records.find(run) for run in runs}
    known = {name: each.result for name, each in found.items() if each is not None}

    def record(results: Mapping[str, RunResult]) -> None:
        for run in runs:
            result = results.get(run.name)
            if result is None or run.name in known or not _is_final(result, accept_failed):
                continue
            finished = result.status == "finished"
            numbers = measure(run, workdir / run.name) if measure and finished else {}
            records.add(run, result, numbers)

    try:
        results = run_sweep(
            runs, str(workdir), processes=processes, limit_seconds=60 * minutes, known=known
        )
    except PreemptedError:
        record(SweepFolder(str(workdir)).read_results())
        raise
    record(results)
    if not accept_failed:
        check_results(results, str(workdir))
    return results


def _is_final(result: RunResult, accept_failed: bool) -> bool:
    """Return True if the run would end in the same way again."""
    # A process that was killed says nothing about the run.
    diverged = result.status == "failed" and not result.error.startswith("its process")
    return result.status == "finished" or (accept_failed and diverged)


def run_study(main: Callable[..., None]) -> None:
    """Run a study from the command line. Exit status 75: stopped; the same command resumes."""
    try:
        tyro.cli(main)
    except PreemptedError as stop:
        print(stop, file=sys.stderr)
        sys.exit(PREEMPTED_EXIT_STATUS)
    except UserError as error:
        sys.exit(f"error: {error}")


def single_run(name: str, settings: Mapping[str, str], experiment: Any) -> SweepRun:
    """Return a run of a study, with its tokens and layers as cost."""
    layers, width = experiment.model.num_layers, experiment.model.d_model
    tokens = experiment.steps * experiment.batch_size * experiment.sequence_length
    return SweepRun(name, settings, experiment, float(tokens * (layers * width + 1000)))


def results_by_settings(
    *parts: tuple[Sequence[SweepRun], Mapping[str, RunResult]],
) -> dict[str, RunResult]:
    """Return the results of all parts of a study, a run of several parts once.

    Parts may name one run differently, or different runs alike.
    """
    return {
        json.dumps(compared_fields(run.experiment)): results[run.name]
        for runs, results in parts
        for run in runs
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def write_record(
    name: str,
    title: str,
    body: str,
    data: Mapping[str, Any],
    results: Mapping[str, RunResult],
    *,
    trained_on: str = "",
    folder: Path = RESULTS,
) -> None:
    """Write NAME.md and NAME.json: the findings, and command, commit, hardware and time.

    Args:
      name: Name of the files, and of the figure NAME.png that the page shows if it exists.
      title: Heading of the page.
      body: Text and tables, Markdown.
      data: Numbers, for NAME.json.
      results: All runs, for their number and wall time.
      trained_on: Machines of the runs, if they are known; the page also names the one it was
        written on.
      folder: Where to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python -m {Path(sys.argv[0]).stem}"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        command = " ".join(["python -m", spec.name, *shown_arguments(sys.argv[1:])])
    where = machine()
    record = {
        "command": command,
        "commit": commit(),
        **where,
        **({"trained on": trained_on} if trained_on else {}),
        "runs": len(results),
        "seconds": round(sum(each.seconds for each in results.values())),
    }
    text = [f"# {title}", "", body, ""]
    if (folder / f"{name}.png").exists():
        text += [f"![{title}]({name}.png)", ""]
    rows = [[f"`{key}`" if key == "command" else key, str(value)] for key, value in record.items()]
    text += [markdown_table(["", ""], rows).replace("`command`", "command"), ""]
    (folder / f"{name}.md").write_text("\n".join(text))
    plain = {**record, **data}
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n")

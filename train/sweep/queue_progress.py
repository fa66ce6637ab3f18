"""Progress of a sweep on standard error: one bar for all runs, or a line for each that ends."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich import progress
from rich.console import Console

from train.errors import printable
from train.runtime.progress import can_draw_bar
from train.runtime.stages import format_clock
from train.runtime.startup import LenientStream
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult, SweepFolder

TAIL_BYTES = 4096
"""Bytes at the end of metrics.jsonl that hold its last line."""


class SweepProgress:
    """Counts of done, running and waiting runs, and the time left.

    The time left weighs runs by their cost, and counts the steps of those in progress.
    """

    def __init__(
        self,
        runs: Sequence[SweepRun],
        finished: Mapping[str, RunResult],
        folder: SweepFolder,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare the display; entering the context shows it.

        Args:
          runs: All runs of the sweep.
          finished: Results of those that are done already.
          folder: Folder of the sweep, whose metrics are read.
          quiet: Show nothing.
          console: Output; None: standard error.
          clock: Returns seconds from any origin.
        """
        stream: Any = LenientStream()
        self._console = console or Console(file=stream, quiet=quiet)
        self._runs, self._folder, self._clock = runs, folder, clock
        self._total_cost = sum(run.cost for run in runs)
        self._done_cost = sum(run.cost for run in runs if run.name in finished)
        self._num_done = sum(run.name in finished for run in runs)
        self._num_failed = 0
        self._running: dict[str, tuple[SweepRun, int, float | None]] = {}
        self._started_at, self._initial_cost = clock(), self._done_cost
        self._bar: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def __enter__(self) -> Self:
        self._started_at = self._clock()
        if can_draw_bar(self._console):
            self._bar = progress.Progress(
                progress.TextColumn("sweep"),
                progress.BarColumn(bar_width=None),
                progress.TextColumn("{task.fields[counts]}", markup=False),
                progress.TextColumn("{task.fields[running]}", markup=False),
                progress.TextColumn("{task.fields[times]}", markup=False),
                console=self._console,
                expand=True,
                redirect_stdout=False,
                refresh_per_second=2,
            )
            self._task = self._bar.add_task(
                "", total=self._total_cost, counts=self._counts_text(), running="", times=""
            )
            self._bar.update(self._task, completed=self._done_cost)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def counts(self) -> tuple[int, int]:
        """Return the number of runs that are done, and of all."""
        return self._num_done, len(self._runs)

    def start(self, run: SweepRun) -> None:
        """Show that a run has started."""
        self._running[run.name] = run, 0, None

    def end(self, run: SweepRun, result: RunResult) -> None:
        """Show that a run has ended."""
        self._running.pop(run.name, None)
        self._num_done += 1
        self._num_failed += result.status == "failed"
        self._done_cost += run.cost
        outcome = f"failed: {result.error}"
        if result.status == "finished":
            outcome = f"{result.metric} {result.value:.4f} in {format_clock(result.seconds)}"
        line = f"[{self._num_done}/{len(self._runs)}] {run.name}: {outcome}"
        if self._bar is None:
            line = f"{line}  ({self._counts_text()}; {self._times_text()})"
        self._console.print(
            printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def refresh(self) -> None:
        """Read how far the running runs are."""
        for name, (run, _, _) in self._running.items():
            step, loss = last_metrics(self._folder, name)
            self._running[name] = run, step, loss
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self._cost_so_far(),
                counts=self._counts_text(),
                running=self._running_text(),
                times=self._times_text(),
            )

    def _cost_so_far(self) -> float:
        in_progress = sum(
            run.cost * min(step / run.experiment.steps, 1.0)
            for run, step, _ in self._running.values()
        )
        return self._done_cost + in_progress

    def _counts_text(self) -> str:
        left = len(self._runs) - self._num_done - len(self._running)
        failed = f" ({self._num_failed} failed)" if self._num_failed else ""
        return f"{self._num_done} done{failed}, {len(self._running)} running, {left} left"

    def _running_text(self) -> str:
        if not self._running:
            return ""
        run, step, loss = next(iter(self._running.values()))
        loss_text = "" if loss is None else f" loss {loss:.4f}"
        return f"{run.name} {step}/{run.experiment.steps}{loss_text}"

    def _times_text(self) -> str:
        elapsed = self._clock() - self._started_at
        # Without what earlier processes of this sweep did: it took none of this one's time.
        progress_made = self._cost_so_far() - self._initial_cost
        left = (
            elapsed / progress_made * (self._total_cost - self._cost_so_far())
            if progress_made > 0
            else None
        )
        return (
            f"{format_clock(elapsed)} elapsed, {'?' if left is None else format_clock(left)} left"
        )


def last_metrics(folder: SweepFolder, name: str) -> tuple[int, float | None]:
    """Return the last logged step of a run and its training loss; (0, None) before the first."""
    try:
        with (folder.run_path(name) / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # cut off, at either end
            continue
        if isinstance(record, dict) and record.get("split") == "train":
            loss = record.get("loss")
            return int(record.get("step", 0)), loss if isinstance(loss, float) else None
    return 0, None

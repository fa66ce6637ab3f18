"""What a run tells the world: the bar, metrics.jsonl, the logbook, the curve, samples.

One host of several speaks; on the others every word is dropped here, so that the loop need not ask.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from types import TracebackType
from typing import Any, Self

from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder, explain_write_errors
from train.run_folder.regular_files import MAX_LOG_BYTES, open_append, read_bytes
from train.telemetry.event_log import EventLog
from train.telemetry.goodput import Activity, ActivityTimer, TimeLog, format_goodput
from train.telemetry.loss_plot import event_steps, plot_losses
from train.telemetry.metrics_log import MetricsLog, read_metrics
from train.telemetry.progress import ProgressBar

_OTHERS = "bits_per_byte_"
"""What the names of metrics begin with that tell what others need for the same text."""


class Reporter:
    """Enter it to show the bar; leaving draws the curve, whatever happened."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        timer: ActivityTimer,
        *,
        initial_step: int,
        is_main_process: bool,
        quiet: bool,
    ):
        self._folder, self._speaks = folder, is_main_process
        self._tokens = 0
        self._progress = ProgressBar(
            experiment.steps,
            initial_step=initial_step,
            description=experiment.name,
            quiet=quiet or not is_main_process,
        )
        self._metrics = MetricsLog(folder)
        self._times = TimeLog(folder, timer, is_writer=is_main_process)
        self._logbook = EventLog(folder.event_log)
        self._references: dict[str, float] = {}
        self._step, self._seconds, self._resumed_at = initial_step, 0.0, time.perf_counter()
        if is_main_process:
            self._metrics.set_aside_after(initial_step or None)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._times.start_compiling(self._step)
        self._resumed_at = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        # What stopped the run is what it is to be told, not that the curve could not be drawn.
        quietly = contextlib.suppress(UserError) if error else contextlib.nullcontext()
        if self._speaks:
            with quietly:
                self._times.write(final=True)
                self._metrics.close()
                metrics = read_metrics(self._folder.metrics)
                events = event_steps(self._logbook.read())
                plot_losses(metrics, self._folder.loss_plot, self._references, events)

    @contextlib.contextmanager
    def pause(self, activity: Activity) -> Any:
        """Around what is not training: it does not count against tokens a second."""
        self._seconds += time.perf_counter() - self._resumed_at
        with self._times.sheet.track(activity):
            yield
        self._resumed_at = time.perf_counter()

    def mark_compiled(self, step: int) -> None:
        """The first step is made, and the program for all others with it: time counts from here."""
        self._times.start_stepping(step)
        self._count_from(step)

    def rewind(self, step: int) -> None:
        """Training goes on from an earlier step; what was written beyond it is moved aside."""
        if self._speaks:
            self._metrics.close()
            self._metrics.set_aside_after(step or None)
        self._progress.update(step)
        self._times.start_stepping(step)
        self._count_from(step)

    def count_step(self, step: int, tokens: int) -> None:
        """A step over so many tokens."""
        self._tokens += tokens
        self._times.record_step(step)

    def _count_from(self, step: int) -> None:
        self._step, self._tokens = step, 0
        self._seconds, self._resumed_at = 0.0, time.perf_counter()

    def log_training(self, step: int, metrics: dict[str, float]) -> None:
        """A line of training metrics; tokens a second are those since the line before."""
        seconds = self._seconds + time.perf_counter() - self._resumed_at
        made = step > self._step
        speed = {"tokens_per_second": self._tokens / max(seconds, 1e-9)} if made else {}
        self._count_from(step)
        self._progress.update(step, loss=metrics["loss"], **speed)
        if self._speaks:
            self._metrics.write(step, "train", {**metrics, **speed})
            self._times.write()

    def log_evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """The held-out metrics at a step; what others need for the same text goes to the curve."""
        shown = ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in metrics.items())
        self._progress.print(f"step {step}: {split} {shown}")
        self._references = {
            name.removeprefix(_OTHERS): bits * metrics["loss"] / metrics["bits_per_byte"]
            for name, bits in metrics.items()
            if name.startswith(_OTHERS)
        }
        if self._speaks:
            self._metrics.write(step, split, metrics)

    def log_sample(self, step: int, text: str) -> None:
        """Something that the model wrote."""
        self._progress.print(f"step {step} writes: {text}")
        if self._speaks:
            path = self._folder.samples
            data = f"--- step {step}\n{text}\n".encode(errors="backslashreplace")
            with explain_write_errors(path):
                if isinstance(path, pathlib.Path):
                    with open_append(path) as file:
                        file.write(data)
                else:  # an object store cannot append
                    before = read_bytes(path, MAX_LOG_BYTES) if path.exists() else b""
                    path.write_bytes(before + data)

    def log_event(self, event: str, **what: Any) -> None:
        """A line of the logbook."""
        if self._speaks:
            self._logbook.write(event, **what)

    def print_goodput(self) -> None:
        """What the run's time went into."""
        if self._speaks:
            self._progress.print(format_goodput(self._times.compute_goodput()))

    def print_message(self, text: str) -> None:
        self._progress.print(text)

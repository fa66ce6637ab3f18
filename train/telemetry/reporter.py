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
from train.run_folder.folder import RunFolder, writing
from train.run_folder.regular_files import LOG_BYTES, open_append, read_bytes
from train.telemetry.event_log import Logbook
from train.telemetry.goodput import TimeLog, Timesheet, What, shown
from train.telemetry.loss_plot import marks, plot_losses
from train.telemetry.metrics_log import MetricsLog, read_metrics
from train.telemetry.progress import Progress

_OTHERS = "bits_per_byte_"
"""What the names of metrics begin with that tell what others need for the same text."""


class Report:
    """Enter it to show the bar; leaving draws the curve, whatever happened."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        timesheet: Timesheet,
        *,
        done: int,
        speaks: bool,
        quiet: bool,
    ):
        self._folder, self._speaks = folder, speaks
        self._tokens = 0
        self._progress = Progress(
            experiment.steps,
            done=done,
            description=experiment.name,
            quiet=quiet or not speaks,
        )
        self._metrics = MetricsLog(folder)
        self._times = TimeLog(folder, timesheet, speaks=speaks)
        self._logbook = Logbook(folder.logbook)
        self._references: dict[str, float] = {}
        self._step, self._seconds, self._resumed_at = done, 0.0, time.perf_counter()
        if speaks:
            self._metrics.resume(done or None)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        self._times.begin(self._step)
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
                self._times.write(last=True)
                self._metrics.close()
                metrics = read_metrics(self._folder.metrics)
                events = marks(self._logbook.read())
                plot_losses(metrics, self._folder.curve, self._references, events)

    @contextlib.contextmanager
    def pause(self, what: What) -> Any:
        """Around what is not training: it does not count against tokens a second."""
        self._seconds += time.perf_counter() - self._resumed_at
        with self._times.sheet.on(what):
            yield
        self._resumed_at = time.perf_counter()

    def compiled(self, step: int) -> None:
        """The first step is made, and the program for all others with it: time counts from here."""
        self._times.step_from(step)
        self._count_from(step)

    def go_back(self, step: int) -> None:
        """Training goes on from an earlier step; what was written beyond it is moved aside."""
        if self._speaks:
            self._metrics.close()
            self._metrics.resume(step or None)
        self._progress.update(step)
        self._times.step_from(step)
        self._count_from(step)

    def step(self, step: int, tokens: int) -> None:
        """A step over so many tokens."""
        self._tokens += tokens
        self._times.step(step)

    def _count_from(self, step: int) -> None:
        self._step, self._tokens = step, 0
        self._seconds, self._resumed_at = 0.0, time.perf_counter()

    def train(self, step: int, metrics: dict[str, float]) -> None:
        """A line of training metrics; tokens a second are those since the line before."""
        seconds = self._seconds + time.perf_counter() - self._resumed_at
        made = step > self._step
        speed = {"tokens_per_second": self._tokens / max(seconds, 1e-9)} if made else {}
        self._count_from(step)
        self._progress.update(step, loss=metrics["loss"], **speed)
        if self._speaks:
            self._metrics.write(step, "train", {**metrics, **speed})
            self._times.write()

    def evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
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

    def sample(self, step: int, text: str) -> None:
        """Something that the model wrote."""
        self._progress.print(f"step {step} writes: {text}")
        if self._speaks:
            path = self._folder.samples
            data = f"--- step {step}\n{text}\n".encode(errors="backslashreplace")
            with writing(path):
                if isinstance(path, pathlib.Path):
                    with open_append(path) as file:
                        file.write(data)
                else:  # an object store cannot append
                    before = read_bytes(path, LOG_BYTES) if path.exists() else b""
                    path.write_bytes(before + data)

    def event(self, event: str, **what: Any) -> None:
        """A line of the logbook."""
        if self._speaks:
            self._logbook.write(event, **what)

    def tell_time(self) -> None:
        """What the run's time went into."""
        if self._speaks:
            self._progress.print(shown(self._times.goodput()))

    def say(self, text: str) -> None:
        self._progress.print(text)

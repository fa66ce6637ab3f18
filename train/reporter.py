"""Report a training run: progress bar, metrics, events, loss plot, samples and time.

Every process has a reporter, and only the main process writes. The loop need not ask which it is.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Self

from train.config.io import flatten_experiment
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
from train.runtime.progress import ProgressBar
from train.telemetry.event_log import EventLog, append_text
from train.telemetry.goodput import Activity, ActivityTimer, TimeLog, format_goodput
from train.telemetry.loss_plot import event_steps, plot_losses
from train.telemetry.metrics_log import MetricsLog, read_metrics
from train.telemetry.trackers import Trackers, TrackingConfig

_REFERENCE_PREFIX = "bits_per_byte_"
"""Prefix of metrics that other compressors reach on the same text."""


class Reporter:
    """Outputs of one run, as a context manager.

    Entering shows the progress bar. Leaving draws the loss plot, also after an error.
    """

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
        """Prepare the outputs; lines after `initial_step` are moved out of metrics.jsonl.

        Args:
          folder: Folder of the run.
          experiment: Its settings, which trackers receive.
          timer: Timer of this life of the run.
          initial_step: Step to continue from; 0 for a new run.
          is_main_process: This process writes; the others write and print nothing.
          quiet: Print nothing.
        """
        self._folder, self._is_main_process = folder, is_main_process
        self._steps, self._initial_step = experiment.steps, initial_step
        self._bar = ProgressBar(
            experiment.steps,
            completed=initial_step,
            description=experiment.name,
            quiet=quiet or not is_main_process,
        )
        self._metrics = MetricsLog(folder.metrics, folder.tensorboard)
        self._time_log = TimeLog(folder.time_log, timer, is_writer=is_main_process)
        self._event_log = EventLog(folder.event_log)
        self._references: dict[str, float] = {}
        self._reset_throughput()
        if is_main_process:
            self._metrics.set_aside_after(initial_step or None)
        # Last, since nothing closes them if another file cannot be opened.
        tracking = experiment.tracking if is_main_process else TrackingConfig()
        settings = flatten_experiment(experiment)
        self._trackers = Trackers(tracking, folder.path, experiment.name, settings, self._bar.print)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        self._time_log.start_compiling(self._initial_step)
        self._resumed_at = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bar.__exit__()
        self._trackers.close(error)
        # The error that has stopped the run must not be hidden by a failure to draw the plot.
        quietly = contextlib.suppress(UserError) if error else contextlib.nullcontext()
        if self._is_main_process:
            with quietly:
                self._time_log.write(final=True, finished=error is None)
                self._metrics.close()
                metrics = read_metrics(self._folder.metrics)
                events = event_steps(self._event_log.read())
                plot_losses(metrics, self._folder.loss_plot, self._references, events)

    @contextlib.contextmanager
    def pause(self, activity: Activity) -> Iterator[None]:
        """Leave the time of the block out of tokens per second, and count it as an activity."""
        self._seconds += time.perf_counter() - self._resumed_at
        with self._time_log.timer.track(activity):
            yield
        self._resumed_at = time.perf_counter()

    @property
    def previous_compile_seconds(self) -> float:
        """Seconds that the previous process of this run took to compile. 0: there was none."""
        return self._time_log.previous_seconds("compile")

    @contextlib.contextmanager
    def compilation(self, step: int) -> Iterator[None]:
        """Count a step as compilation, as its program is new."""
        with self.pause("compile"):
            yield
        self._bar.update(step)
        self._time_log.start_stepping(step)

    def rewind(self, step: int) -> None:
        """Continue from an earlier step after a rollback. Later metrics lines are moved aside."""
        if self._is_main_process:
            self._metrics.close()
            self._metrics.set_aside_after(step or None)
        self._bar.update(step)
        self._time_log.start_stepping(step)
        self._reset_throughput()

    def count_step(self, step: int, tokens: int) -> None:
        """Count a step over `tokens` tokens; 0 for one whose time is not counted."""
        self._tokens += tokens
        self._time_log.record_step(step)

    def _reset_throughput(self) -> None:
        self._tokens = 0
        self._seconds, self._resumed_at = 0.0, time.perf_counter()

    def log_training(self, step: int, metrics: dict[str, float]) -> None:
        """Write a line of training metrics, with the tokens per second since the line before."""
        seconds = self._seconds + time.perf_counter() - self._resumed_at
        status = f"{step}/{self._steps}  loss {metrics['loss']:.4f}"
        if self._tokens:
            speed = self._tokens / max(seconds, 1e-9)
            metrics = {**metrics, "tokens_per_second": speed}
            status += f"  {speed:,.0f} tokens/s"
        self._reset_throughput()
        self._bar.update(step, status)
        if self._is_main_process:
            self._metrics.write(step, "train", metrics)
            self._trackers.log(step, "train", metrics)
            self._time_log.write()

    def log_evaluation(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Write a line of evaluation metrics; compression baselines go to the loss plot."""
        metrics_text = ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in metrics.items())
        self.print_message(f"step {step}: {split} {metrics_text}")
        # The plot has nats a token, so bits a byte are converted by the run's own ratio.
        self._references = {
            name.removeprefix(_REFERENCE_PREFIX): bits * metrics["loss"] / metrics["bits_per_byte"]
            for name, bits in metrics.items()
            if name.startswith(_REFERENCE_PREFIX)
        }
        if self._is_main_process:
            self._metrics.write(step, split, metrics)
            self._trackers.log(step, split, metrics)

    def log_sample(self, step: int, text: str) -> None:
        """Print a generated text, and append it to samples.txt."""
        self.print_message(f"step {step}: sample: {text}")
        self._trackers.log_sample(step, text)
        if self._is_main_process:
            append_text(self._folder.samples, f"--- step {step}\n{text}\n")

    def log_event(self, event: str, **fields: Any) -> None:
        """Write a line of the event log."""
        if self._is_main_process:
            self._event_log.write(event, **fields)

    def print_end(self) -> None:
        """Print how the run's time was used, where its files are, and how to use the model."""
        if self._is_main_process:
            self.print_message(format_goodput(self._time_log.compute_goodput()))
            folder = self._folder.path
            self.print_message(f"finished: {folder}; python -m train sample {folder} --prompt TEXT")

    def print_message(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._bar.print(text)

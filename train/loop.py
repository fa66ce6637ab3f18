"""The training loop: `fit` trains a run from step 0, or resumes it from its newest checkpoint.

The order of things:

1. `RunSetup` (`train/run_setup.py`) reads the folder, the data and the settings, and checks that
   they fit together. It writes nothing: a run that cannot start leaves its folder as it was.
2. `_TrainingLoop.run` restores or initializes the state and writes the run's files.
3. `train_until_anomaly` is the loop over steps. `train_with_rollbacks` calls it again after every
   rollback.
4. The final evaluation.

The loop is the only code that touches the clock, the disk and the screen during training; the
compiled step (`train/step.py`) is a pure function.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.writer import install_log_filters
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.data.batches import prefetch
from train.data.python_data import hold_data
from train.data.source_mixing import source_shares
from train.data.token_file import HostBatch
from train.debug_checks import check_batch_tokens, check_finite
from train.errors import UserError
from train.estimate.remedies import suggest_remedies
from train.evaluation.early_stopping import BestEvaluation
from train.experiment import Experiment
from train.recovery.detector import DETECTOR_METRICS
from train.recovery.rollback import Anomaly, AnomalyMonitor
from train.run import Run, read_final_metrics
from train.run_folder.folder import RunFolder
from train.run_folder.lock import RunLock, lock_run_folder
from train.run_setup import RunSetup
from train.runtime.local_hardware import enable_compilation_cache, local_hardware
from train.runtime.oom import explain_oom
from train.runtime.progress import ProgressBar
from train.runtime.signals import PreemptedError, StopRequest
from train.runtime.stages import Stage, show_stages, stage
from train.state import TrainState
from train.step import Batch, Metrics
from train.telemetry.goodput import ActivityTimer, previous_resume_seconds
from train.telemetry.profiling import profile_steps
from train.telemetry.reporter import Reporter
from train.telemetry.start_messages import print_finished
from train.warm_start import (
    WarmStartSource,
)


def fit(
    experiment: Experiment | str,
    workdir: str | os.PathLike[str] = "",
    *,
    data: Any = None,
    validation_data: Any = None,
    params: Mapping[str, Any] | None = None,
    init_from: str | os.PathLike[str] = "",
    init_only: str = "",
    init_adapter: str = "",
    from_scratch: bool = False,
    quiet: bool = False,
    start_time: float | None = None,
) -> Run:
    """Train an experiment. In a folder with checkpoints, resume from the newest, bit for bit.

    Args:
      experiment: What to train: settings, or the name of a config, as `python -m train fit` takes
        it.
      workdir: Folder of the run, local or remote. `runs/<name>` if empty.
      data: Training examples from Python, in place of `experiment.data.path`: strings or arrays of
        token ids for (masked) language modeling, (text, label) pairs for classification, (tokens,
        tags) for tagging, (source, target) for translation; for a task of arrays (`ArrayTask`), a
        dict of arrays by name, with a row for each example. Or a dict of those by split: `train`,
        `validation`, `test`. A run of them resumes with the same data only.
      validation_data: Validation examples. By default some of `data` are held out, as the data
        settings say (`validation_fraction`).
      params: Weights to start with, as nested dicts of arrays, for example `run.params`: all of the
        model or some. The others are initialized from the seed. Ignored when the run resumes.
      init_from: Folder of a run to start with the weights of, as `train.load` reads them. Its
        tokenizer is used too, unless the experiment names one (kind `file` or `byte`). Vocabulary
        tables get the rows of the tokens that both have. Or a file of word vectors (of word2vec,
        GloVe or fastText), with which the embeddings begin. Not read when the run resumes.
      init_only: Pattern of the weights to start with, by tree path: `layers`, `*/mixer/*`.
      init_adapter: Folder of a LoRA adapter in PEFT's format to start with, for the weights of
        `init_from`. It gives `lora.rank`, `lora.alpha` and `lora.targets`.
      from_scratch: Begin at step 0 where a run has lost all its checkpoints, which is an error
        otherwise. A run with an intact checkpoint is resumed all the same.
      quiet: Print nothing.
      start_time: Start of the program, in seconds since the epoch; the time since then counts as
        start-up in the goodput report. Now if None.

    Returns:
      The run, with its final weights and metrics.

    Raises:
      UserError: something the user can correct, for example another process that trains in this
        folder. Files written before are kept.
      PreemptedError: the process was told to stop, and has saved a checkpoint.
    """
    timer, hardware = ActivityTimer(start_time), local_hardware()
    if isinstance(experiment, str):
        experiment = find_experiment(experiment)
    held = None
    if data is not None:
        experiment, held = hold_data(experiment, data, validation_data)
    elif validation_data is not None:
        raise UserError("validation_data: data is not given; give the training examples as data")
    install_log_filters()
    enable_compilation_cache()
    with (
        RunFolder.created(workdir or f"runs/{experiment.name}") as folder,
        show_stages(quiet=quiet or jax.process_index() != 0),
        lock_run_folder(folder, ProgressBar(1, quiet=quiet).print) as lock,
        explain_oom(lambda: suggest_remedies(resolve_precision(experiment, hardware))),
    ):
        warm_start = WarmStartSource(params, os.fspath(init_from), init_only, init_adapter)
        setup = RunSetup(experiment, folder, hardware, warm_start, from_scratch=from_scratch)
        run = _TrainingLoop(setup, timer, lock, quiet).run()
    return dataclasses.replace(run, data=held)


EVALUATED_BY = ("evaluation.", "early_stopping.", "checkpoint.keep_best")
"""Prefixes of the settings that decide which weights a finished run is evaluated with, and how."""


class _Session(NamedTuple):
    """Resources that are open while a run trains."""

    checkpoints: CheckpointManager
    reporter: Reporter
    stop_request: StopRequest


class _TrainingLoop:
    """Loop over the steps of a run, and the evaluations and checkpoints between them."""

    def __init__(self, setup: RunSetup, timer: ActivityTimer, lock: RunLock | None, quiet: bool):
        self.setup, self.timer, self.lock, self.quiet = setup, timer, lock, quiet
        self.experiment, self.engine = setup.experiment, setup.engine
        self.evaluator, self.recovery = setup.evaluator, setup.recovery
        self.save_seconds = 0.0  # of the last save, to estimate the next one
        self.compiled_shapes: set[tuple[Any, ...]] = set()
        self.has_logged_save = not setup.is_new_run  # "resumed" tells of a checkpoint too

    def run(self) -> Run:
        """Train to the last step, evaluate, and return the run."""
        is_main_process = jax.process_index() == 0
        with self.setup.open_checkpoints() as checkpoints:
            with self.timer.track("restore"), self.stage_of_restore(checkpoints):
                start = self.setup.restore_or_init(checkpoints)
            state, step = start.state, start.step
            finished = self.evaluator.is_finished(step)
            as_before = not any(name.startswith(EVALUATED_BY) for name in self.setup.changed_fields)
            metrics = None
            if finished and as_before:
                metrics = read_final_metrics(self.setup.folder, step)
            if metrics is not None:  # A finished run: nothing to train, evaluate or write.
                quiet = self.quiet or not is_main_process
                note = self.setup.unread_source
                print_finished(self.experiment, self.setup.folder, step, note=note, quiet=quiet)
                weights = self.evaluator.final_weights(state, step, checkpoints)
                return self.evaluator.make_run(weights, metrics)
            if is_main_process:
                self.setup.write_run_files()
            reporter = Reporter(
                self.setup.folder,
                self.experiment,
                self.timer,
                initial_step=step,
                is_main_process=is_main_process,
                quiet=self.quiet,
            )
            with reporter, StopRequest() as stop_request:
                self.setup.log_skipped_checkpoints(reporter, start)
                self.setup.log_start(reporter, step)
                if not finished:
                    session = _Session(checkpoints, reporter, stop_request)
                    state = self.train_with_rollbacks(state, step, session)
                with reporter.pause("evaluate"):
                    weights = self.evaluator.final_weights(state, int(state.step), checkpoints)
                    metrics = self.evaluator.report_final_metrics(
                        weights, int(state.step), reporter
                    )
                with reporter.pause("save"), stage("writing the last checkpoint"):
                    checkpoints.wait()
                # After the wait: a run that has finished has a checkpoint.
                reporter.log_event("finished", step=int(state.step), **metrics)
                reporter.print_goodput()
        return self.evaluator.make_run(weights, metrics)

    def stage_of_restore(self, checkpoints: CheckpointManager) -> AbstractContextManager[Stage]:
        """Return a stage for `restore_or_init`, with the time that it took before."""
        if not checkpoints.steps():
            return stage("initializing the weights")
        seconds = previous_resume_seconds(self.setup.folder)
        return stage("restoring the newest checkpoint", expected_seconds=seconds)

    def train_with_rollbacks(self, state: TrainState, step: int, session: _Session) -> TrainState:
        """Return the state after the last step, rolling back whenever an anomaly demands it."""
        checkpoints, reporter = session.checkpoints, session.reporter
        while True:
            state, anomaly = self.train_until_anomaly(state, step, session)
            if anomaly is None:
                return state
            with reporter.pause("recover"), stage("rolling back"):
                if self.lock is not None:  # Another process may have taken the run over.
                    self.lock.verify_ownership()
                # Before the record is made, which deletes the state to free its memory.
                metadata = self.setup.checkpoint_metadata(state, BestEvaluation())
                init = self.setup.init_state
                self.recovery.record_rollback(anomaly, state, init, checkpoints, metadata)
                # A rollback takes the same path as a resumed process, so that a crash in the middle
                # of one changes nothing.
                start = self.setup.restore_or_init(checkpoints)
                state, step = start.state, start.step
            reporter.rewind(step)
            self.setup.log_skipped_checkpoints(reporter, start)

    def train_until_anomaly(
        self, state: TrainState, start_step: int, session: _Session
    ) -> tuple[TrainState, Anomaly | None]:
        """Train to the last step, or to an anomaly that needs a rollback."""
        experiment, engine, evaluator = self.experiment, self.engine, self.evaluator
        checkpoints, reporter, stop_request = session
        monitor = AnomalyMonitor(experiment.recovery, reporter)
        expected = reporter.previous_compile_seconds
        profiled = experiment.profiled_steps, self.setup.folder, start_step, reporter.print_message
        with (
            contextlib.closing(prefetch(self.load_batch, int(state.cursor))) as batches,
            profile_steps(engine.step, *profiled) as train_step,
        ):
            for step in range(start_step + 1, experiment.steps + 1):
                if self.lock is not None:
                    self.lock.check_ownership()
                # Read and placed by a thread, some batches ahead of the step that uses them.
                cursor, (tokens, batch) = next(batches)
                shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
                if shapes in self.compiled_shapes:
                    state, metrics = train_step(state, batch)
                else:
                    self.compiled_shapes.add(shapes)
                    # Wait for the step, so that compile time is not counted as training.
                    jax.block_until_ready(state)
                    with (
                        reporter.compilation(step),
                        stage("compiling the training step", expected_seconds=expected),
                    ):
                        state, metrics = train_step(state, batch)
                        jax.block_until_ready(metrics)
                    tokens = expected = 0
                if experiment.debug_checks:
                    metrics = check_finite(step, cursor, metrics)
                reporter.count_step(step, tokens)
                self.log_first_save(session)
                if step % experiment.log_every == 0 or step == experiment.steps:
                    shares = source_shares(self.setup.batches, cursor + 1)
                    reporter.log_training(step, {**fetch_metrics(metrics), **shares})

                # The monitor reads metrics some steps late, so that the host does not wait for the
                # devices. Before a state is evaluated or saved it must wait: no checkpoint may hold
                # an anomaly that is not known yet.
                stop_signal = stop_request.requested_by()
                save_due = checkpoints.is_due(step)
                wait = bool(stop_signal) or evaluator.evaluates_after(step) or save_due
                if anomaly := monitor.find_anomaly(step, cursor, metrics, wait=wait):
                    return state, anomaly
                self.recovery.log_if_recovered(step, reporter)
                evaluator.evaluate_and_sample(step, state, reporter)
                # After the evaluation, which may end the run early.
                is_last = evaluator.is_finished(step)
                if is_last or stop_signal or save_due or evaluator.is_best(step):
                    with reporter.pause("save"):
                        self.save_checkpoint(step, state, checkpoints)
                if is_last:
                    break
                if stop_signal:
                    self.exit_preempted(step, stop_signal, session)
        return state, None

    def log_first_save(self, session: _Session) -> None:
        """Log once that a checkpoint is complete: without one, the run would begin anew."""
        saved = session.checkpoints.saved_step
        if saved is not None and not self.has_logged_save:
            session.reporter.log_event("saved", step=saved)
            self.has_logged_save = True

    def load_batch(self, cursor: int) -> tuple[int, Batch]:
        """Return the number of tokens of a global batch, and the batch on the devices."""
        rows = self.setup.batches.host_batch(cursor, jax.process_index(), jax.process_count())
        if self.experiment.debug_checks:
            check_batch_tokens(cursor, rows, self.experiment.model)
        return count_tokens(rows) * jax.process_count(), self.engine.put_batch(rows)

    def exit_preempted(self, step: int, stop_signal: str, session: _Session) -> NoReturn:
        """Wait for the checkpoint of this step, then raise PreemptedError."""
        session.checkpoints.wait()
        session.reporter.log_event("preempted", step=step, reason=stop_signal)
        raise PreemptedError(
            f"{self.setup.folder.path}: stopped by {stop_signal} at step {step}, checkpoint saved; "
            "run the same command to resume"
        )

    def save_checkpoint(self, step: int, state: TrainState, checkpoints: CheckpointManager) -> None:
        """Start to save a checkpoint. The copy to disk continues in the background."""
        if self.lock is not None:
            self.lock.verify_ownership()
        if self.evaluator.is_best(step):
            checkpoints.keep_best(step)
        with stage("saving a checkpoint", expected_seconds=self.save_seconds) as progress:
            metadata = self.setup.checkpoint_metadata(state, self.evaluator.best)
            checkpoints.save(step, state, metadata)
        self.save_seconds = progress.elapsed
        self.setup.release_warm_start()


def count_tokens(rows: HostBatch) -> int:
    """Return the number of tokens without padding. Translation counts both languages."""
    segments = [array for name, array in rows.items() if name.endswith("segments")]
    if not segments:  # no padding; examples without tokens count as one each
        return rows.get("tokens", rows["examples"]).size
    return sum(int(np.count_nonzero(each)) for each in segments)


def fetch_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the logged metrics as numbers, without the detector's. Waits for the step to end."""
    logged = {name: value for name, value in metrics.items() if name not in DETECTOR_METRICS}
    return {name: float(value) for name, value in jax.device_get(logged).items()}

"""The training loop: from the state of step 0, or of the newest checkpoint, to the last step.

The order of things:

1. `TrainingLoop.run` restores or initializes the state and writes the run's files.
2. `train_until_anomaly` is the loop over steps. `train_with_rollbacks` calls it again after every
   rollback.
3. The final evaluation.

The loop is the only code that touches the clock, the disk and the screen during training; the
compiled step (`train/step.py`) is a pure function.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from train.checkpoint.manager import CheckpointManager
from train.data.batches import prefetch
from train.data.token_file import HostBatch
from train.detector import DETECTOR_METRICS
from train.engines.debug_checks import check_batch_tokens, check_finite
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.eval_weights import EvalWeights
from train.reporter import Reporter
from train.resume import read_final_metrics
from train.rollback import Anomaly, AnomalyMonitor
from train.run import Run
from train.run_folder.lock import RemoteOwner
from train.run_setup import RunSetup
from train.runtime.signals import PreemptedError, StopRequest
from train.runtime.stages import Stage, stage
from train.start_messages import log_skipped_checkpoints, log_start, print_finished
from train.state import TrainState
from train.step import Batch, Metrics
from train.telemetry.goodput import ActivityTimer, previous_resume_seconds
from train.telemetry.profiling import profile_steps

EVALUATED_BY = ("evaluation.", "early_stopping.", "checkpoint.keep_best")
"""Prefixes of the settings that decide which weights a finished run is evaluated with, and how."""


class _Session(NamedTuple):
    """Resources that are open while a run trains."""

    checkpoints: CheckpointManager
    reporter: Reporter
    stop_request: StopRequest


class TrainingLoop:
    """Loop over the steps of a run, and the evaluations and checkpoints between them."""

    def __init__(
        self, setup: RunSetup, timer: ActivityTimer, lock: RemoteOwner | None, quiet: bool
    ):
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
            self.compile_ahead(checkpoints)
            with self.timer.track("restore"), self.stage_of_restore(checkpoints):
                start = self.setup.restore_or_init(checkpoints)
            state, step = start.state, start.step
            finished = self.evaluator.is_finished(step)
            as_before = not any(name.startswith(EVALUATED_BY) for name in self.setup.changed_fields)
            metrics = None
            if finished and as_before:
                metrics = read_final_metrics(self.setup.folder, step)
            if metrics is not None:  # A finished run: nothing to train, evaluate or write.
                print_finished(self.setup, step, quiet=self.quiet or not is_main_process)
                weights = self.evaluator.final_weights(state, step, checkpoints)
                return self.trained_run(weights, metrics)
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
                log_skipped_checkpoints(self.setup, reporter, start)
                log_start(self.setup, reporter, step)
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
                reporter.print_end()
        return self.trained_run(weights, metrics)

    def trained_run(self, weights: EvalWeights, metrics: dict[str, float]) -> Run:
        """Return the trained run with these weights and metrics."""
        return Run(
            experiment=self.experiment,
            folder=self.setup.folder,
            model=self.engine.model,
            params=weights.params,
            tokenizer=self.setup.corpus.tokenizer,
            labels=self.setup.corpus.labels,
            step=weights.steps[-1],
            final_metrics=metrics,
        )

    def compile_ahead(self, checkpoints: CheckpointManager) -> None:
        """Start to compile the step while the state is made or restored, if steps are left."""
        saved, batches = max(checkpoints.steps(), default=0), self.setup.batches
        finished = saved and read_final_metrics(self.setup.folder, saved) is not None
        if not finished and batches.one_shape and self.experiment.compile == "jit":
            rows = batches.host_batch(0, jax.process_index(), jax.process_count())
            self.engine.compile_step_ahead(self.engine.put_batch(rows))

    def stage_of_restore(self, checkpoints: CheckpointManager) -> AbstractContextManager[Stage]:
        """Return a stage for `restore_or_init`, with the time that it took before."""
        if not checkpoints.steps():
            return stage("initializing the weights")
        seconds = previous_resume_seconds(self.setup.folder.time_log)
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
            log_skipped_checkpoints(self.setup, reporter, start)

    def train_until_anomaly(
        self, state: TrainState, start_step: int, session: _Session
    ) -> tuple[TrainState, Anomaly | None]:
        """Train to the last step, or to an anomaly that needs a rollback."""
        experiment, engine, evaluator = self.experiment, self.engine, self.evaluator
        checkpoints, reporter, stop_request = session
        monitor = AnomalyMonitor(experiment.recovery, reporter)
        expected = reporter.previous_compile_seconds
        traces, show = self.setup.folder.profile, reporter.print_message
        with (
            contextlib.closing(prefetch(self.load_batch, int(state.cursor))) as batches,
            profile_steps(
                engine.step, experiment.profiled_steps, traces, start_step, show
            ) as train_step,
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
                    logged = fetch_metrics(metrics)
                    shares = self.setup.batches.source_shares(cursor + 1)
                    if len(shares) > 1:
                        logged = {**logged, **{f"share/{name}": x for name, x in shares.items()}}
                    reporter.log_training(step, logged)

                # The monitor reads metrics a step late, so that the host does not wait for the
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
        # Looked up until then alone: the step is read from the disk.
        if not self.has_logged_save and (saved := session.checkpoints.saved_step) is not None:
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

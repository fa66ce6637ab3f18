"""The training loop: `fit` trains a run from step 0, or resumes it from its newest checkpoint.

The order of things:

1. `_TrainingRun.__init__` reads the folder, the data and the settings, and checks that they fit
   together. It writes nothing: a run that cannot start leaves its folder as it was.
2. `_TrainingRun.run` restores or initializes the state and writes the run's files.
3. `train_until_anomaly` is the loop over steps. `train_with_rollbacks` calls it again after every
   rollback.
4. The final evaluation.

The loop is the only code that touches the clock, the disk and the screen during training; the
compiled step (`train/step.py`) is a pure function.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from train.checkpoint.discovery import SkippedCheckpoint
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import PROVENANCE_KEY, collect_provenance
from train.checkpoint.writer import install_log_filters
from train.config.io import diff_experiments
from train.config.resolve import resolve_precision
from train.data.batches import prefetch
from train.data.mixing import data_position, seek, source_shares
from train.data.python_data import check_same_data, hold_data
from train.data.streams import HostBatch
from train.data.tokenizer import Tokenizer
from train.debug_checks import check_batch_tokens, check_finite
from train.engine import make_engine
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.evaluator import Evaluator
from train.experiment import Experiment
from train.lora.base_weights import attach_base, base_metadata, resolve_lora, start_from_base
from train.parallel.checks import check_batch_divides
from train.recovery.detector import DETECTOR_METRICS
from train.recovery.rollback import Anomaly, AnomalyMonitor, RollbackManager, rollback_retention
from train.resume import (
    RunIdentity,
    StartPoint,
    check_resumable,
    pin_previous_choices,
    read_previous_run,
    restore_or_init,
)
from train.run import Run, read_final_metrics
from train.run_folder.folder import RunFolder
from train.run_folder.lock import RunLock, lock_run_folder
from train.run_folder.run_config import write_run_files
from train.run_folder.writing import set_aside_file
from train.runtime.backend_probes import mark_broken_kernels
from train.runtime.local_hardware import enable_compilation_cache, local_hardware
from train.runtime.oom import check_minimum_memory, explain_oom, suggest_remedies
from train.runtime.signals import PreemptedError, StopRequest
from train.state import TrainState
from train.step import Batch, Metrics
from train.tasks.base import Task
from train.tasks.registry import make_task
from train.telemetry.goodput import ActivityTimer
from train.telemetry.progress import ProgressBar
from train.telemetry.reporter import Reporter
from train.telemetry.start_messages import log_start, log_warm_start, print_finished
from train.warm_start import (
    WarmStartReport,
    WarmStartSource,
    copy_pretrained_files,
    names_a_tokenizer,
    warm_state,
)
from transformer.hardware import Hardware


def fit(
    experiment: Experiment,
    workdir: str = "",
    *,
    data: Any = None,
    validation_data: Any = None,
    params: Any = None,
    init_from: str = "",
    init_only: str = "",
    init_adapter: str = "",
    quiet: bool = False,
    start_time: float | None = None,
) -> Run:
    """Train an experiment. In a folder with checkpoints, resume from the newest, bit for bit.

    Args:
      experiment: What to train.
      workdir: Folder of the run, local or remote. `runs/<name>` if empty.
      data: Training examples from Python, in place of `experiment.data.path`: strings or arrays of
        token ids for (masked) language modeling, (text, label) pairs for classification, (tokens,
        tags) for tagging, (source, target) for translation. Or a dict of lists by split: `train`,
        `validation`, `test`. A run of them resumes with the same data only.
      validation_data: Validation examples. By default some of `data` are held out, as the data
        settings say (`validation_fraction`).
      params: Weights to start with, as nested dicts of arrays, for example `run.params`: all of the
        model or some. The others are initialized from the seed. Ignored when the run resumes.
      init_from: Folder of a run to start with the weights of, as `train.load` reads them. Its
        tokenizer is used too, unless the experiment names one (kind `file` or `byte`). Vocabulary
        tables get the rows of the tokens that both have. Not read when the run resumes.
      init_only: Pattern of the weights to start with, by tree path: `layers`, `*/mixer/*`.
      init_adapter: Folder of a LoRA adapter in PEFT's format to start with, for the weights of
        `init_from`. It gives `lora.rank`, `lora.alpha` and `lora.targets`.
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
    held = None
    if data is not None:
        experiment, held = hold_data(experiment, data, validation_data)
    elif validation_data is not None:
        raise UserError("validation_data: data is not given; give the training examples as data")
    install_log_filters()
    enable_compilation_cache()
    folder = RunFolder.create(workdir or f"runs/{experiment.name}")
    with (
        lock_run_folder(folder, ProgressBar(1, quiet=quiet).print) as lock,
        explain_oom(lambda: suggest_remedies(resolve_precision(experiment, hardware))),
    ):
        warm_start = WarmStartSource(params, init_from, init_only, init_adapter)
        run = _TrainingRun(experiment, folder, hardware, timer, lock, quiet, warm_start).run()
    return dataclasses.replace(run, data=held)


class _Session(NamedTuple):
    """Resources that are open while a run trains."""

    checkpoints: CheckpointManager
    reporter: Reporter
    stop_request: StopRequest


class _TrainingRun:
    """One call of `fit`. Constructing it checks everything and writes nothing."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        hardware: Hardware,
        timer: ActivityTimer,
        lock: RunLock | None,
        quiet: bool,
        warm_start: WarmStartSource,
    ):
        self.folder, self.timer, self.lock, self.quiet = folder, timer, lock, quiet
        previous = read_previous_run(folder, hardware)
        self.is_new_run = previous is None
        if previous:
            check_same_data(folder.path, previous.experiment.data.path, experiment.data.path)

        # Settings and data. The tokenizer of a resumed run is the saved one; the vocabulary size
        # and the number of labels follow from the data.
        experiment = resolve_precision(experiment, hardware, previous and previous.experiment)
        task, tokenizer = make_task(experiment), previous.tokenizer if previous else None
        # A resumed run has the weights in its checkpoints: their source may be gone.
        self.warm_start = None if previous else warm_start.read(folder)
        if self.warm_start and not names_a_tokenizer(experiment.data.tokenizer):
            tokenizer = self.warm_start.tokenizer
        self.warm_start_report: WarmStartReport | None = None
        self.corpus = task.prepare_corpus(tokenizer, previous.labels if previous else None)
        self.experiment = resolve_lora(
            task.resolve_experiment(self.corpus),
            previous and previous.experiment,
            self.warm_start,
            hardware,
            init_adapter=warm_start.init_adapter,
        )
        hardware = mark_broken_kernels(self.experiment, hardware)
        self.task = make_task(self.experiment)
        self.changed_fields = check_resumable(folder, previous, self.experiment)
        self.batches = self.task.training_batches(self.corpus)
        if self.experiment.sample.every:
            check_prompt(self.task, self.experiment.sample.prompt, self.corpus.tokenizer)

        # The engine uses what `auto` was when the run began, also where this version of the package
        # or this machine would choose otherwise: another attention backend rounds differently.
        pinned = pin_previous_choices(self.experiment, previous, hardware)
        self.pinned_fields = diff_experiments(self.experiment, pinned)
        self.engine = make_engine(pinned, hardware)
        check_batch_divides(self.engine.mesh, self.experiment)
        check_minimum_memory(self.engine, self.experiment)
        self.evaluator = Evaluator(self.experiment, self.engine, self.corpus, folder)
        self.recovery = RollbackManager(self.experiment, folder, resuming=previous is not None)
        record = collect_provenance(self.experiment, self.corpus.tokenizer, self.corpus.labels)
        self.identity = RunIdentity(folder, self.experiment, record, self.corpus.digest)

    def run(self) -> Run:
        """Train to the last step, evaluate, and return the run."""
        is_main_process = jax.process_index() == 0
        with self.open_checkpoints() as checkpoints:
            with self.timer.track("restore"):
                start = self.restore_or_init(checkpoints)
            state, step = start.state, start.step
            finished = self.evaluator.is_finished(step)
            metrics = read_final_metrics(self.folder, step) if finished else None
            if metrics is not None:  # A finished run: nothing to train, evaluate or write.
                quiet = self.quiet or not is_main_process
                print_finished(self.experiment, self.folder, step, quiet=quiet)
                weights = self.evaluator.final_weights(state, step, checkpoints)
                return self.evaluator.make_run(weights, metrics)
            if is_main_process:
                self.write_run_files()
            reporter = Reporter(
                self.folder,
                self.experiment,
                self.timer,
                initial_step=step,
                is_main_process=is_main_process,
                quiet=self.quiet,
            )
            with reporter, StopRequest() as stop_request:
                self.log_skipped_checkpoints(reporter, step, start.skipped_checkpoints)
                self.log_start(reporter, step)
                if not finished:
                    session = _Session(checkpoints, reporter, stop_request)
                    state = self.train_with_rollbacks(state, step, session)
                with reporter.pause("evaluate"):
                    weights = self.evaluator.final_weights(state, int(state.step), checkpoints)
                    metrics = self.evaluator.report_final_metrics(
                        weights, int(state.step), reporter
                    )
                reporter.print_goodput()
        return self.evaluator.make_run(weights, metrics)

    # ---- Training ----

    def train_with_rollbacks(self, state: TrainState, step: int, session: _Session) -> TrainState:
        """Return the state after the last step, rolling back whenever an anomaly demands it."""
        checkpoints, reporter = session.checkpoints, session.reporter
        while True:
            state, anomaly = self.train_until_anomaly(state, step, session)
            if anomaly is None:
                return state
            with reporter.pause("recover"):
                if self.lock is not None:  # Another process may have taken the run over.
                    self.lock.verify_ownership()
                metadata = self.checkpoint_metadata(state, BestEvaluation())
                self.recovery.record_rollback(anomaly, state, self.engine, checkpoints, metadata)
                # A rollback takes the same path as a resumed process, so that a crash in the middle
                # of one changes nothing.
                start = self.restore_or_init(checkpoints)
                state, step = start.state, start.step
            reporter.rewind(step)
            self.log_skipped_checkpoints(reporter, step, start.skipped_checkpoints)

    def train_until_anomaly(
        self, state: TrainState, start_step: int, session: _Session
    ) -> tuple[TrainState, Anomaly | None]:
        """Train to the last step, or to an anomaly that needs a rollback."""
        experiment, engine, evaluator = self.experiment, self.engine, self.evaluator
        checkpoints, reporter, stop_request = session
        monitor = AnomalyMonitor(experiment.recovery, reporter)
        with contextlib.closing(prefetch(self.load_batch, int(state.cursor))) as batches:
            for step in range(start_step + 1, experiment.steps + 1):
                if self.lock is not None:
                    self.lock.check_ownership()
                cursor, (tokens, batch) = next(batches)
                state, metrics = engine.step(state, batch)
                if experiment.debug_checks:
                    metrics = check_finite(step, cursor, metrics)
                reporter.count_step(step, tokens)
                if step == start_step + 1:
                    # Wait for the first step, so that compile time is not counted as training.
                    jax.block_until_ready(metrics)
                    reporter.mark_compiled(step)
                if step % experiment.log_every == 0 or step == experiment.steps:
                    shares = source_shares(self.batches, cursor + 1)
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
                is_last = evaluator.is_finished(step)
                if is_last or stop_signal or save_due or evaluator.is_best(step):
                    with reporter.pause("save"):
                        self.save_checkpoint(step, state, checkpoints)
                if is_last:
                    break
                if stop_signal:
                    self.exit_preempted(step, stop_signal, session)
        return state, None

    def load_batch(self, cursor: int) -> tuple[int, Batch]:
        """Return the number of tokens of a global batch, and the batch on the devices."""
        rows = self.batches.host_batch(cursor, jax.process_index(), jax.process_count())
        if self.experiment.debug_checks:
            check_batch_tokens(cursor, rows, self.experiment.model)
        return count_tokens(rows) * jax.process_count(), self.engine.put_batch(rows)

    def exit_preempted(self, step: int, stop_signal: str, session: _Session) -> NoReturn:
        """Wait for the checkpoint of this step, then raise PreemptedError."""
        session.checkpoints.wait()
        session.reporter.log_event("preempted", step=step, why=stop_signal)
        raise PreemptedError(
            f"{self.folder.path}: stopped by {stop_signal} at step {step}, checkpoint saved; "
            "run the same command to resume"
        )

    # ---- The run's folder ----

    def restore_or_init(self, checkpoints: CheckpointManager) -> StartPoint:
        """Return the newest valid state of the run, or its initial state."""
        start = restore_or_init(
            self.identity,
            checkpoints,
            self.recovery.history,
            abstract_state=self.engine.abstract_state(),
            init=self.init_state,
        )
        if self.engine.lora is not None and self.engine.frozen is None:  # resumed
            attach_base(self.engine, self.folder, checkpoints, start.step)
        self.evaluator.restore_best(start.best, checkpoints)
        seek(self.batches, start.data_position)
        return start

    def init_state(self) -> TrainState:
        """Return the state before the first step, with the weights of a warm start."""
        state = self.engine.init()
        if self.engine.lora is not None:
            # A rollback to before the first checkpoint finds the base weights in the folder.
            source = self.warm_start if self.engine.frozen is None else None
            state, report = start_from_base(
                self.engine,
                self.folder,
                state,
                source,
                self.corpus.tokenizer,
                self.experiment.seed,
            )
            self.warm_start_report = report or self.warm_start_report
            return state
        if not self.is_new_run:  # rolled back to before the first checkpoint
            self.warm_start = WarmStartSource.of_earlier_start(self.folder).read(self.folder)
        if self.warm_start is not None:
            state, self.warm_start_report = warm_state(
                state, self.warm_start, self.corpus.tokenizer
            )
        return state

    def write_run_files(self) -> None:
        """Write the files of the run's folder that describe the run."""
        if self.is_new_run:
            # A record of rollbacks is from an earlier run here, whose checkpoints were deleted.
            # A resume would take it for this run's.
            set_aside_file(self.folder.rollback_record, "earlier")
            if self.warm_start is not None:
                copy_pretrained_files(self.warm_start, self.folder, self.corpus.tokenizer)
        write_run_files(
            self.folder,
            self.experiment,
            self.corpus.tokenizer,
            self.corpus.labels,
            auto_choices=self.engine.auto_choices(),
            hardware=self.engine.model.hardware,
        )

    def open_checkpoints(self) -> CheckpointManager:
        """Return the checkpoint manager, keeping what averages and rollbacks need."""
        settings, rollbacks = self.experiment.checkpoint, rollback_retention(self.experiment)
        averaged = self.experiment.evaluation.average_checkpoints
        return CheckpointManager(
            self.folder.checkpoints,
            save_every=settings.every,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_last_due=max(averaged, rollbacks.keep_last_due),
            keep_min_age=rollbacks.keep_min_age,
            verify=settings.verify,
        )

    def save_checkpoint(self, step: int, state: TrainState, checkpoints: CheckpointManager) -> None:
        """Start to save a checkpoint. The copy to disk continues in the background."""
        if self.lock is not None:
            self.lock.verify_ownership()
        if self.evaluator.is_best(step):
            checkpoints.keep_best(step)
        checkpoints.save(step, state, self.checkpoint_metadata(state, self.evaluator.best))

    def checkpoint_metadata(self, state: TrainState, best: BestEvaluation) -> dict[str, Any]:
        """Return what a checkpoint holds beside the state, as JSON."""
        return {
            PROVENANCE_KEY: self.identity.provenance,
            "corpus": self.identity.corpus_digest,
            "best": best.to_json(),
            **data_position(self.batches, int(state.cursor)),
            **base_metadata(self.folder, self.engine),
            **self.recovery.history.metadata,
        }

    # ---- Messages and events ----

    def log_start(self, reporter: Reporter, step: int) -> None:
        """Log how the run starts or resumes, and which weights it starts with."""
        log_start(
            reporter,
            self.engine,
            self.experiment,
            self.folder,
            step,
            training_data=self.task.describe_training_data(self.corpus),
            notes=(*self.corpus.notes, *self.task.untrained_parts),
            changed=self.changed_fields,
            pinned=self.pinned_fields,
        )
        if self.warm_start is not None and self.warm_start_report is not None:
            log_warm_start(reporter, self.warm_start, self.warm_start_report)

    def log_skipped_checkpoints(
        self, reporter: Reporter, step: int, skipped: Sequence[SkippedCheckpoint]
    ) -> None:
        """Log why training starts from this step: damaged checkpoints, or a rollback."""
        for skipped_step, reason in skipped:
            reporter.log_event("passed over", step=skipped_step, why=reason)
            reporter.print_message(f"checkpoint of step {skipped_step}: {reason}; skipped")
        self.recovery.log_rollback(step, reporter)


def check_prompt(task: Task, prompt: str, tokenizer: Tokenizer | None) -> None:
    """Raise UserError for a sample prompt that the task cannot use, before training starts."""
    try:
        task.check_prompt(prompt, tokenizer)
    except UserError as error:
        problem = str(error).removeprefix("the text: ").removeprefix(f"prompt {prompt!r}: ")
        raise UserError(f"sample.prompt {prompt!r}: {problem}") from error


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

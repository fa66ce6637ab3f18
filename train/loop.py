"""Training a run from its first step, or from where it stopped, to its last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from train.checkpoint.discovery import SkippedCheckpoint
from train.checkpoint.log_filters import install_log_filters
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import PROVENANCE_KEY, collect_provenance
from train.config.io import diff_experiments
from train.config.resolve import resolve_precision, unavailable_backends
from train.data.batches import prefetch
from train.data.streams import HostBatch
from train.data.tokenizer import Tokenizer
from train.doctor.report import accelerator_warnings
from train.engine import make_engine
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.evaluator import Evaluator
from train.experiment import Experiment
from train.parallel.batches import check_batch_divides
from train.recovery.detector import DETECTOR_METRICS
from train.recovery.monitor import AnomalyMonitor
from train.recovery.rollback import Anomaly, RollbackManager, rollback_retention
from train.resume import (
    check_resumable,
    pin_previous_choices,
    read_final_metrics,
    read_previous_run,
    restore_or_init,
    write_run_config,
)
from train.run import Run
from train.run_folder.folder import RunFolder
from train.run_folder.lock import RunLock, lock_run_folder
from train.runtime.attention_kernels import mark_broken_kernels
from train.runtime.hardware import enable_compilation_cache, local_hardware
from train.runtime.oom import check_minimum_memory, explain_oom, suggest_remedies
from train.runtime.signals import PreemptedError, StopRequest
from train.state import TrainState
from train.step import Batch, Metrics
from train.tasks.base import Task
from train.tasks.registry import make_task
from train.telemetry.goodput import ActivityTimer
from train.telemetry.progress import ProgressBar
from train.telemetry.reporter import Reporter
from transformer.hardware import Hardware


def fit(
    experiment: Experiment,
    workdir: str = "",
    *,
    quiet: bool = False,
    start_time: float | None = None,
) -> Run:
    """Trains; in a folder that has checkpoints it goes on from the newest, bit for bit.

    Args:
      experiment: What to train.
      workdir: The run's folder, local or remote; `runs/<name>` if empty.
      quiet: Show nothing.
      began: When what has led to this call began, seconds since the epoch: time is booked from
        then on. Now if None.

    Raises:
      UserError: something the user can put right, another process that trains in this folder for
        example; what was written before is still there.
      PreemptedError: the process was told to stop, and has saved a checkpoint.
    """
    timesheet, hardware = ActivityTimer(start_time), local_hardware()
    install_log_filters()
    enable_compilation_cache()
    folder = RunFolder.create(workdir or f"runs/{experiment.name}")
    with (
        lock_run_folder(folder, ProgressBar(1, quiet=quiet).print) as lock,
        explain_oom(lambda: suggest_remedies(resolve_precision(experiment, hardware))),
    ):
        return _TrainingRun(experiment, folder, hardware, timesheet, lock, quiet).run()


class _TrainingRun:
    """What the parts of one `fit` share. Making it writes nothing."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        hardware: Hardware,
        timesheet: ActivityTimer,
        lock: RunLock | None,
        quiet: bool,
    ):
        self.folder, self.timesheet, self.quiet = folder, timesheet, quiet
        self.lock = lock
        before = read_previous_run(folder, hardware)
        self.anew = before is None
        experiment = resolve_precision(experiment, hardware, before and before.experiment)
        task, tokenizer = make_task(experiment), before.tokenizer if before else None
        self.corpus = task.prepare_corpus(tokenizer, before.labels if before else None)
        self.experiment = task.resolve_experiment(self.corpus)
        hardware = mark_broken_kernels(self.experiment, hardware)
        self.task = make_task(self.experiment)
        self.differences = check_resumable(folder, before, self.experiment)
        self.batches = self.task.training_batches(self.corpus)
        if self.experiment.sample.every:
            check_prompt(self.task, self.experiment.sample.prompt, self.corpus.tokenizer)
        chosen = pin_previous_choices(self.experiment, before, hardware)
        self.kept = diff_experiments(self.experiment, chosen)
        self.engine = make_engine(chosen, hardware)
        check_batch_divides(self.engine.mesh, self.experiment)
        check_minimum_memory(self.engine, self.experiment)
        self.judge = Evaluator(self.experiment, self.engine, self.corpus, folder)
        self.recovery = RollbackManager(self.experiment, folder, resuming=before is not None)

    def run(self) -> Run:
        settings, path = self.experiment.checkpoint, self.folder.checkpoints
        rollbacks = rollback_retention(self.experiment)
        with CheckpointManager(
            path,
            save_every=settings.every,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_last_due=max(
                self.experiment.evaluation.average_checkpoints, rollbacks.keep_last_due
            ),
            keep_min_age=rollbacks.keep_min_age,
            verify=settings.verify,
        ) as checkpoints:
            with self.timesheet.track("restore"):
                state, done, passed_over = restore_or_init(self.judge, checkpoints, self.recovery)
            speaks = jax.process_index() == 0
            ended = self.judge.is_finished(done)
            metrics = read_final_metrics(self.folder, done) if ended else None
            if metrics is not None:
                quiet = self.quiet or not speaks
                early = done < self.experiment.steps
                ProgressBar(done, quiet=quiet).print(
                    f"{self.experiment.name} is finished: {done} steps are done, and "
                    f"{'evaluations got no better' if early else 'as many were asked for'}; "
                    f"in {self.folder.path}"
                )
                return self.judge.make_run(
                    self.judge.final_weights(state, done, checkpoints), metrics
                )
            if speaks:
                write_run_config(self.judge, is_new_run=self.anew)
            report = Reporter(
                self.folder,
                self.experiment,
                self.timesheet,
                initial_step=done,
                is_main_process=speaks,
                quiet=self.quiet,
            )
            with report, StopRequest() as stop:
                self.announce(report, done, passed_over)
                if not ended:
                    state = self.train(state, done, checkpoints, report, stop)
                with report.pause("evaluate"):
                    served = self.judge.final_weights(state, int(state.step), checkpoints)
                    metrics = self.judge.report_final_metrics(served, int(state.step), report)
                report.print_goodput()
        return self.judge.make_run(served, metrics)

    def announce(
        self, report: Reporter, done: int, passed_over: Sequence[SkippedCheckpoint]
    ) -> None:
        self.tell(report, done, passed_over)
        count = sum(leaf.size for leaf in jax.tree.leaves(self.engine.abstract_state().params))
        hardware = self.engine.model.hardware
        report.log_event(
            "resumed" if done else "started",
            step=done,
            hardware=dataclasses.asdict(hardware),
            mesh=dict(self.engine.mesh.shape),
            changed={name: new for name, (_, new) in self.differences.items()},
            kept={name: choice for name, (_, choice) in self.kept.items()},
        )
        for warning in accelerator_warnings(hardware.platform):
            report.print_message(warning)
        for kernel, why in hardware.broken_kernels:
            report.log_event("fell back", kernel=kernel, why=why)
            report.print_message(
                f"attention kernel {kernel}: cannot be compiled here ({why}); another is used. "
                "See python -m train doctor"
            )
        for name, choice in unavailable_backends(
            self.engine.auto_choices(), self.experiment
        ).items():
            report.log_event("fell back", setting=name, to=choice)
        amount = self.task.describe_training_data(self.corpus)
        verb = f"goes on from step {done}" if done else "begins"
        report.print_message(
            f"{self.experiment.name} {verb}: {count:,} parameters, {amount}, "
            f"{hardware.count} {hardware.kind or hardware.platform}; in {self.folder.path}"
        )
        for name, (old, new) in self.differences.items():
            report.print_message(f"{name} is {new} from here on, and was {old}")
        for note in (*self.corpus.notes, *self.task.untrained_parts):
            report.print_message(note)

    def tell(self, report: Reporter, done: int, passed_over: Sequence[SkippedCheckpoint]) -> None:
        """What has led to the step that is gone on from."""
        for step, why in passed_over:
            report.log_event("passed over", step=step, why=why)
            report.print_message(f"checkpoint of step {step}: {why}; passed over")
        self.recovery.log_rollback(done, report)

    def train(
        self,
        state: TrainState,
        done: int,
        checkpoints: CheckpointManager,
        report: Reporter,
        stop: StopRequest,
    ) -> TrainState:
        """Stretches of steps, each but the last of which has ended in trouble."""
        while True:
            state, trouble = self.stretch(state, done, checkpoints, report, stop)
            if trouble is None:
                return state
            with report.pause("recover"):
                if self.lock is not None:
                    self.lock.verify_ownership()
                first = self.extra(BestEvaluation())
                self.recovery.decide(trouble, state, self.engine, checkpoints, first)
                state, done, passed_over = restore_or_init(self.judge, checkpoints, self.recovery)
            report.rewind(done)
            self.tell(report, done, passed_over)

    def stretch(
        self,
        state: TrainState,
        done: int,
        checkpoints: CheckpointManager,
        report: Reporter,
        stop: StopRequest,
    ) -> tuple[TrainState, Anomaly | None]:
        """Steps until the run is at its end, or has trouble."""
        experiment, engine = self.experiment, self.engine
        lookout = AnomalyMonitor(experiment.recovery, report)
        with contextlib.closing(prefetch(self.load, int(state.cursor))) as batches:
            for step in range(done + 1, experiment.steps + 1):
                if self.lock is not None:
                    self.lock.check_ownership()
                cursor, (tokens, batch) = next(batches)
                state, metrics = engine.step(state, batch)
                report.count_step(step, tokens)
                if step == done + 1:
                    jax.block_until_ready(metrics)
                    report.mark_compiled(step)
                if step % experiment.log_every == 0 or step == experiment.steps:
                    report.log_training(step, fetch_metrics(metrics))
                asked = stop.requested_by()
                # Nothing is saved or judged before it is known to be in line.
                now = bool(asked) or self.judge.evaluates_after(step) or checkpoints.is_due(step)
                if trouble := lookout.check(step, cursor, metrics, wait=now):
                    return state, trouble
                self.recovery.log_if_recovered(step, report)
                self.judge.evaluate_and_sample(step, state, report)
                last = self.judge.is_finished(step)
                if last or asked or checkpoints.is_due(step) or self.judge.is_best(step):
                    with report.pause("save"):
                        self.save(step, state, checkpoints)
                if last:
                    break
                if asked:
                    self.leave(step, asked, checkpoints, report)
        return state, None

    def leave(
        self, step: int, asked: str, checkpoints: CheckpointManager, report: Reporter
    ) -> NoReturn:
        """Stops, the checkpoint of this step being on its way."""
        checkpoints.wait()
        report.log_event("preempted", step=step, why=asked)
        raise PreemptedError(
            f"{self.folder.path}: stopped by {asked} at step {step}, "
            "checkpoint saved; the same command goes on from there"
        )

    def save(self, step: int, state: TrainState, checkpoints: CheckpointManager) -> None:
        if self.lock is not None:
            self.lock.verify_ownership()
        if self.judge.is_best(step):
            checkpoints.keep_best(step)
        checkpoints.save(step, state, self.extra(self.judge.best))

    def extra(self, best: BestEvaluation) -> dict[str, Any]:
        """What a checkpoint holds beside the state."""
        corpus = self.corpus
        return {
            PROVENANCE_KEY: collect_provenance(self.experiment, corpus.tokenizer, corpus.labels),
            "corpus": corpus.digest,
            "best": best.to_json(),
            **self.recovery.metadata,
        }

    def load(self, cursor: int) -> tuple[int, Batch]:
        """How many tokens a batch has, and the batch on the devices."""
        rows = self.batches.host_batch(cursor, jax.process_index(), jax.process_count())
        return count_tokens(rows) * jax.process_count(), self.engine.put_batch(rows)


def check_prompt(task: Task, prompt: str, tokenizer: Tokenizer) -> None:
    """Raises UserError now, and not after the steps before the first sample."""
    try:
        task.check_prompt(prompt, tokenizer)
    except UserError as error:
        problem = str(error).removeprefix("the text: ").removeprefix(f"prompt {prompt!r}: ")
        raise UserError(f"sample.prompt {prompt!r}: {problem}") from error


def count_tokens(rows: HostBatch) -> int:
    """The tokens of a batch that are no padding: of a translation, those of the source too."""
    segments = [array for name, array in rows.items() if name.endswith("segments")]
    return sum(int(np.count_nonzero(each)) for each in segments)


def fetch_metrics(metrics: Metrics) -> dict[str, float]:
    """Metrics as numbers, without those of the watch: this waits for the step to end."""
    told = {name: value for name, value in metrics.items() if name not in DETECTOR_METRICS}
    return {name: float(value) for name, value in jax.device_get(told).items()}

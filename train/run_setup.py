"""Preparation of a run: its folder, settings, data, engine and first state.

`RunSetup` is one call of `fit` without the loop. Constructing it reads the folder, the data and the
settings and checks that they fit together. It writes nothing: a run that cannot start leaves its
folder as it was. Its methods restore or initialize the state, and write what the folder holds
beside the logs.
"""

from typing import Any

from train.assembly import make_engine, make_task, training_options, with_task
from train.checkpoint.manager import CheckpointManager
from train.config.io import diff_experiments
from train.config.resolve import resolve_auto, resolve_precision
from train.data.python_data import check_same_data
from train.data.tokenizer import Tokenizer
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.evaluator import Evaluator
from train.experiment import Experiment
from train.parallel.context_parallel import check_batch_divides
from train.resume import (
    RunIdentity,
    StartPoint,
    check_resumable,
    pin_previous_choices,
    read_previous_run,
    restore_newest,
)
from train.rollback import RollbackManager, rollback_retention
from train.run_folder.base_weights import attach_base, base_metadata
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import PROVENANCE_KEY, collect_provenance
from train.run_folder.run_config import write_run_files
from train.runtime.backend_probes import mark_broken_kernels
from train.runtime.writing import set_aside_file
from train.start_messages import log_start, log_warm_start
from train.state import TrainState
from train.tasks.task import Task
from train.telemetry.reporter import Reporter
from train.warm_start.lora_start import resolve_lora, start_from_base, unused_settings
from train.warm_start.sources import (
    PYTHON_SOURCE,
    WarmStartReport,
    WarmStartSource,
    check_same_weights,
    copy_files_of_source,
    explain_unread_source,
    merge_params,
    names_a_tokenizer,
    seeded_weights,
)
from transformer.hardware import Hardware


class RunSetup:
    """Settings, data, engine and folder of a run. Constructing it checks all and writes nothing."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        hardware: Hardware,
        warm_start: WarmStartSource,
        *,
        from_scratch: bool = False,
    ):
        self.folder, self.from_scratch = folder, from_scratch
        previous = read_previous_run(folder, hardware, from_scratch=from_scratch)
        self.is_new_run = previous is None
        if previous:
            check_same_data(folder.path, previous.experiment.data.path, experiment.data.path)

        # Settings and data. The tokenizer of a resumed run is the saved one; the vocabulary size
        # and the number of labels follow from the data.
        experiment = resolve_precision(experiment, hardware, previous and previous.experiment)
        task, tokenizer = make_task(experiment), previous.tokenizer if previous else None
        # Settings of another run are refused before the data are read, which may take long.
        check_resumable(folder, previous, experiment, unresolved=("model.", "task.", "lora."))
        # A resumed run has the weights in its checkpoints: their source may be gone.
        self.warm_start = None if previous else warm_start.read(folder, experiment.task)
        self.unread_source = explain_unread_source(folder, warm_start) if previous else ""
        if self.warm_start and not names_a_tokenizer(experiment.data.tokenizer):
            tokenizer = self.warm_start.tokenizer
        self.warm_start_report: WarmStartReport | None = None
        self.warm_start_is_logged = previous is not None
        self.corpus = task.prepare_corpus(tokenizer, previous.labels if previous else None)
        self.experiment = resolve_lora(
            with_task(experiment, task.resolve(self.corpus)),
            previous and previous.experiment,
            self.warm_start,
            hardware,
            init_adapter=warm_start.init_adapter,
        )
        self.notes = tuple(unused_settings(experiment.lora, self.experiment.lora))
        hardware = mark_broken_kernels(
            self.experiment.model,
            self.experiment.sequence_length,
            hardware,
            segments=self.experiment.has_segments,
            on_mesh=self.experiment.compile == "jit" and hardware.count > 1,
        )
        self.task = make_task(self.experiment)
        self.changed_fields = check_resumable(folder, previous, self.experiment)
        check_base_is_frozen(self.task, self.experiment.lora)
        options = training_options(self.experiment)
        self.batches = self.task.training_batches(self.corpus, options)
        if self.experiment.sample.every:
            check_prompt(self.task, self.experiment.sample.prompt, self.corpus.tokenizer)

        # The engine uses what `auto` was when the run began, also where this version of the package
        # or this machine would choose otherwise: another attention backend rounds differently.
        pinned = pin_previous_choices(self.experiment, previous, hardware)
        self.pinned_fields = diff_experiments(self.experiment, pinned)
        self.engine = make_engine(pinned, hardware)
        mesh = self.engine.mesh
        self.auto_choices = resolve_auto(pinned, hardware, mesh.shape["context"])
        field, rows = self.experiment.row_multiple
        check_batch_divides(mesh, field, rows, self.experiment.grad_accum_steps)
        self.evaluator = Evaluator(self.experiment, self.engine, self.corpus)
        self.recovery = RollbackManager(self.experiment, folder, resuming=previous is not None)
        record = collect_provenance(self.experiment, self.corpus.tokenizer, self.corpus.labels)
        self.identity = RunIdentity(folder, self.experiment, record, self.corpus.digest)

    def restore_or_init(self, checkpoints: CheckpointManager) -> StartPoint:
        """Return the newest valid state of the run, or its initial state."""
        start = restore_newest(
            self.identity,
            checkpoints,
            self.recovery.history,
            abstract_state=self.engine.abstract_state(),
            init=self.init_state,
            from_scratch=self.from_scratch and self.is_new_run,
        )
        if self.engine.lora is not None and self.engine.frozen is None:  # resumed
            attach_base(self.engine, self.folder, checkpoints, start.step)
        self.evaluator.restore_best(start.best, checkpoints)
        self.batches.seek(start.data_position)
        return start

    def init_state(self) -> TrainState:
        """Return the state before the first step, with the weights of a warm start."""
        if self.engine.lora is not None:
            # A rollback to before the first checkpoint finds the base weights in the folder.
            source = self.warm_start if self.engine.frozen is None else None
            state, report = start_from_base(
                self.engine,
                self.folder,
                self.engine.init(),
                source,
                self.corpus.tokenizer,
                self.experiment.seed,
            )
            self.warm_start_report = report or self.warm_start_report
            return state
        warm_start = self.warm_start
        if warm_start is None and self.warm_start_is_logged:  # rolled back to the start
            request = WarmStartSource.of_earlier_start(self.folder)
            warm_start = request.read(self.folder, self.experiment.task)
            check_same_weights(self.folder, warm_start)
        if warm_start is None:
            return self.engine.init()
        params, self.warm_start_report = merge_params(
            self.engine.abstract_state().params,
            seeded_weights(self.engine.model, self.experiment.seed),
            warm_start,
            self.corpus.tokenizer,
        )
        return self.engine.init(params)

    def release_warm_start(self) -> None:
        """Free the weights of the source, once a checkpoint makes a rollback to the start unlikely.

        Such a rollback reads them again. Weights from Python stay: only the caller has them.
        """
        if self.warm_start is not None and self.warm_start.source != PYTHON_SOURCE:
            self.warm_start, self.warm_start_is_logged = None, True

    def write_run_files(self) -> None:
        """Write the files of the run's folder that describe the run."""
        if self.is_new_run:
            # A record of rollbacks is from an earlier run here, whose checkpoints are lost.
            # A resume would take it for this run's.
            set_aside_file(self.folder.rollback_record, "earlier")
            if self.warm_start is not None:
                copy_files_of_source(self.warm_start, self.folder, self.corpus.tokenizer)
            else:
                set_aside_file(self.folder.pretrained, "earlier")
        write_run_files(
            self.folder,
            self.experiment,
            self.corpus.tokenizer,
            self.corpus.labels,
            auto_choices=self.auto_choices,
            hardware=self.engine.model.hardware,
        )

    def open_checkpoints(self) -> CheckpointManager:
        """Return the checkpoint manager, keeping what averages and rollbacks need."""
        settings = self.experiment.checkpoint
        rollbacks = rollback_retention(settings, self.experiment.recovery)
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

    def checkpoint_metadata(self, state: TrainState, best: BestEvaluation) -> dict[str, Any]:
        """Return what a checkpoint holds beside the state, as JSON."""
        position = self.batches.position(int(state.cursor))
        return {
            PROVENANCE_KEY: self.identity.provenance,
            "corpus": self.identity.corpus_digest,
            "best": best.to_json(),
            **({} if position is None else {"data_position": position}),
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
            auto_choices=self.auto_choices,
            is_new_run=self.is_new_run,
            training_data=self.task.describe_training_data(self.corpus),
            notes=(*self.notes, *self.corpus.notes, *self.task.untrained_parts),
            changed=self.changed_fields,
            pinned=self.pinned_fields,
        )
        if self.unread_source:
            reporter.print_message(self.unread_source)
        if self.warm_start is not None and self.warm_start_report is not None:
            log_warm_start(reporter, self.warm_start, self.warm_start_report)

    def log_skipped_checkpoints(self, reporter: Reporter, start: StartPoint) -> None:
        """Log why training starts from this step: damaged checkpoints, or a rollback."""
        for step, reason in start.skipped_checkpoints:
            reporter.log_event("checkpoint skipped", step=step, reason=reason)
            reporter.print_message(f"checkpoint of step {step}: {reason}; skipped")
        self.recovery.log_rollback(start.step, reporter)


def check_prompt(task: Task, prompt: str, tokenizer: Tokenizer | None) -> None:
    """Raise UserError for a sample prompt that the task cannot use, before training starts."""
    try:
        task.check_prompt(prompt, tokenizer)
    except UserError as error:
        problem = str(error).removeprefix("the text: ").removeprefix(f"prompt {prompt!r}: ")
        raise UserError(f"sample.prompt {prompt!r}: {problem}") from error


def check_base_is_frozen(task: Task, lora: LoRAConfig) -> None:
    """Raise UserError for a task that compares with base weights which a run does not keep."""
    if task.needs_base_weights and (not lora.rank or lora.train_fully):
        setting = f"train_fully {lora.train_fully[0]}" if lora.rank else "rank 0"
        raise UserError(
            f"lora.{setting}: DPO needs an adapter, as its reference is the model without one; "
            "give --init-from W --lora.rank 8 and the model of W, or --task.reference data"
        )

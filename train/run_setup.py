"""Preparation of a run: its folder, settings, data, engine and first state.

`RunSetup` is one call of `fit` without the loop. Constructing it reads the folder, the data and the
settings and checks that they fit together. It writes nothing: a run that cannot start leaves its
folder as it was. Each of its steps needs what the one before returns:

    previous run -> requested settings -> corpus -> resolved settings -> pinned settings -> engine

Its methods restore or initialize the state, and write what the folder holds beside the logs.
"""

from typing import Any

from train.assembly import (
    make_engine,
    make_task,
    training_options,
    with_broken_kernels,
    with_task,
)
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy
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
    PreviousRun,
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
from train.runtime.writing import set_aside_file
from train.state import TrainState
from train.tasks.task import Corpus, Task
from train.warm_start.lora_start import resolve_lora, start_from_base, unused_settings
from train.warm_start.sources import (
    PYTHON_SOURCE,
    WarmStart,
    WarmStartReport,
    WarmStartSource,
    check_same_weights,
    copy_files_of_source,
    merge_params,
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
        source: WarmStartSource,
        *,
        from_scratch: bool = False,
    ):
        self.folder, self.source, self.from_scratch = folder, source, from_scratch
        self.previous = read_previous_run(folder, hardware, from_scratch=from_scratch)
        requested = check_request(experiment, self.previous, folder, hardware)
        # A resumed run has the weights in its checkpoints: their source may be gone.
        self.warm_start = None if self.previous else source.read(folder, requested.task)
        self.warm_start_report: WarmStartReport | None = None
        self.warm_start_is_logged = self.previous is not None
        self.corpus = prepare_corpus(requested, self.previous, self.warm_start)
        self.experiment = resolve_settings(
            requested, self.corpus, self.previous, self.warm_start, hardware, source.init_adapter
        )
        self.changed_fields = check_resumable(folder, self.previous, self.experiment)
        self.unused_settings = tuple(unused_settings(requested.lora, self.experiment.lora))
        self.task = make_task(self.experiment)
        check_base_is_frozen(self.task, self.experiment.lora)
        self.batches = self.task.training_batches(self.corpus, training_options(self.experiment))
        if self.experiment.sample.every:
            check_prompt(self.task, self.experiment.sample.prompt, self.corpus.tokenizer)

        # The engine uses what `auto` was when the run began, also where this version of the package
        # or this machine would choose otherwise: another attention backend rounds differently.
        hardware = with_broken_kernels(hardware, self.experiment)
        pinned = pin_previous_choices(self.experiment, self.previous, hardware)
        self.pinned_fields = diff_experiments(self.experiment, pinned)
        self.engine = make_engine(pinned, hardware)
        self.auto_choices = resolve_auto(pinned, hardware, self.engine.mesh.shape["context"])
        field, rows = self.experiment.row_multiple
        check_batch_divides(self.engine.mesh, field, rows, self.experiment.grad_accum_steps)
        self.evaluator = Evaluator(self.experiment, self.engine, self.corpus)
        self.recovery = RollbackManager(self.experiment, folder, resuming=not self.is_new_run)
        record = collect_provenance(self.experiment, self.corpus.tokenizer, self.corpus.labels)
        self.identity = RunIdentity(folder, self.experiment, record, self.corpus.digest)

    @property
    def is_new_run(self) -> bool:
        """True if the folder held no run."""
        return self.previous is None

    def restore_or_init(self, checkpoints: CheckpointManager) -> StartPoint:
        """Return the newest valid state of the run, or its initial state."""
        start = restore_newest(
            self.identity,
            checkpoints,
            self.recovery,
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
        retention = RetentionPolicy(
            keep_last=settings.keep_last,
            save_every=settings.every,
            keep_last_due=max(averaged, rollbacks.keep_last_due),
            keep_min_age=rollbacks.keep_min_age,
            keep_every=settings.keep_every,
        )
        return CheckpointManager(self.folder.checkpoints, retention, verify=settings.verify)

    def checkpoint_metadata(self, state: TrainState, best: BestEvaluation) -> dict[str, Any]:
        """Return what a checkpoint holds beside the state, as JSON."""
        position = self.batches.position(int(state.cursor))
        return {
            PROVENANCE_KEY: self.identity.provenance,
            "corpus": self.identity.corpus_digest,
            "best": best.to_json(),
            **({} if position is None else {"data_position": position}),
            **base_metadata(self.folder, self.engine),
            **self.recovery.metadata,
        }


def check_request(
    experiment: Experiment, previous: PreviousRun | None, folder: RunFolder, hardware: Hardware
) -> Experiment:
    """Return the requested settings, with the precision that `auto` means.

    Those of another run are refused here, before the data are read, which may take long.
    """
    if previous is not None:
        check_same_data(folder.path, previous.experiment.data.path, experiment.data.path)
    experiment = resolve_precision(experiment, hardware, previous and previous.experiment)
    check_resumable(folder, previous, experiment, unresolved=("model.", "task.", "lora."))
    return experiment


def prepare_corpus(
    experiment: Experiment, previous: PreviousRun | None, warm_start: WarmStart | None
) -> Corpus:
    """Read the data, with the tokenizer and the labels of a resumed run.

    A warm start brings the tokenizer of its source, whose tokens the weights know, unless the
    settings name one: of a file, or the bytes.
    """
    tokenizer = previous.tokenizer if previous else None
    requested = experiment.data.tokenizer
    if warm_start is not None and not (requested is not None and requested.is_given):
        tokenizer = warm_start.tokenizer
    return make_task(experiment).prepare_corpus(tokenizer, previous.labels if previous else None)


def resolve_settings(
    experiment: Experiment,
    corpus: Corpus,
    previous: PreviousRun | None,
    warm_start: WarmStart | None,
    hardware: Hardware,
    init_adapter: str,
) -> Experiment:
    """Return the settings with what the data and the source of the weights decide."""
    experiment = with_task(experiment, make_task(experiment).resolve(corpus))
    return resolve_lora(
        experiment,
        previous and previous.experiment,
        warm_start,
        hardware,
        init_adapter=init_adapter,
    )


def check_prompt(task: Task, prompt: str, tokenizer: Tokenizer | None) -> None:
    """Raise UserError for a sample prompt that the task cannot use, before training starts."""
    try:
        task.check_prompt(prompt, tokenizer)
    except UserError as error:
        raise UserError(f"sample.prompt: {error}") from error


def check_base_is_frozen(task: Task, lora: LoRAConfig) -> None:
    """Raise UserError for a task that compares with base weights which a run does not keep."""
    if task.needs_base_weights and (not lora.rank or lora.train_fully):
        setting = f"train_fully {lora.train_fully[0]}" if lora.rank else "rank 0"
        raise UserError(
            f"lora.{setting}: DPO needs an adapter, as its reference is the model without one; "
            "give --init-from W --lora.rank 8 and the model of W, or --task.reference data"
        )

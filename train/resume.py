"""Resuming a run: read what its folder holds, check that it can be resumed, restore its state.

A resumed run continues bit for bit. Hence nothing that shapes the result may differ from the saved
run (`check_resumable`), `auto` settings stay what they were (`pin_previous_choices`), and a
checkpoint of other data or settings is refused (`_restore_state`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.checkpoint.discovery import SkippedCheckpoint, no_valid_checkpoint_error
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import check_provenance, explain_library_mismatch
from train.checkpoint.reader import RestoredCheckpoint
from train.config.io import diff_experiments, forbidden_changes
from train.config.resolve import pin_auto
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.experiment import Experiment
from train.recovery.rollback_record import RollbackHistory
from train.run import read_auto_choices, read_experiment
from train.run_folder.folder import RunFolder
from train.state import TrainState
from train.tasks.vocabulary import Labels, read_labels, read_tokenizer
from transformer.hardware import Hardware


class PreviousRun(NamedTuple):
    """A run that its folder holds already."""

    experiment: Experiment
    tokenizer: Tokenizer | None
    labels: Labels
    auto_choices: dict[str, str]
    """Resolved `auto` settings. Empty if the run began on another kind of hardware."""


def read_previous_run(folder: RunFolder, hardware: Hardware) -> PreviousRun | None:
    """Return the run of a folder, or None if the folder has no checkpoint to resume from."""
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        if checkpoints.latest_step() is None:
            return None
    experiment = read_experiment(folder)
    return PreviousRun(
        experiment,
        read_tokenizer(folder, experiment),
        read_labels(folder),
        read_auto_choices(folder, hardware),
    )


def pin_previous_choices(
    experiment: Experiment, previous: PreviousRun | None, hardware: Hardware
) -> Experiment:
    """Return the experiment with each `auto` set to what it was when the run began.

    A new `model.remat` voids the choices: it decides the layer loop and the memory of attention.
    """
    if previous is None or experiment.model.remat != previous.experiment.model.remat:
        return experiment
    try:
        return pin_auto(experiment, previous.auto_choices, hardware)
    except ValueError as error:
        raise UserError(f"config.json: chosen.{error}; restore the original file") from error


def check_resumable(
    folder: RunFolder,
    previous: PreviousRun | None,
    requested: Experiment,
    unresolved: tuple[str, ...] = (),
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ from the saved run, as {name: (saved, requested)}.

    Raises:
      UserError: one of them must not change when a run is resumed. Nothing is written before.
        Fields of `unresolved` parts, some of which the data decide, are not compared.
    """
    changes = diff_experiments(previous.experiment, requested) if previous else {}
    changes = {name: pair for name, pair in changes.items() if not name.startswith(unresolved)}
    if forbidden := forbidden_changes(changes):
        # Of a part of another kind all settings differ: the kind is what the user changed.
        name = min(forbidden, key=lambda each: not each.endswith(".kind"))
        old, new = forbidden[name]
        raise UserError(
            f"{folder.path}: its run was trained with {name} = {old}, not {new}"
            f"{f' (and {len(forbidden) - 1} more differ)' if len(forbidden) > 1 else ''}; "
            "give another --workdir, or the settings of its config.txt"
        )
    return changes


class RunIdentity(NamedTuple):
    """Settings and data that a checkpoint must agree with to be restored."""

    folder: RunFolder
    experiment: Experiment
    provenance: Mapping[str, Any]
    """`collect_provenance` of the settings, tokenizer and labels."""
    corpus_digest: str


class StartPoint(NamedTuple):
    """State from which training starts or resumes."""

    state: TrainState
    step: int
    best: BestEvaluation
    """Best evaluation until then."""
    skipped_checkpoints: list[SkippedCheckpoint]
    """Newer checkpoints that are damaged or incomplete, newest first."""
    data_position: Any = None
    """Position in streamed data (`train.data.source_mixing.data_position`)."""


def restore_or_init(
    run: RunIdentity,
    checkpoints: CheckpointManager,
    rollbacks: RollbackHistory,
    *,
    abstract_state: TrainState,
    init: Callable[[], TrainState],
) -> StartPoint:
    """Restore the newest valid checkpoint, or initialize the state if there is none.

    Damaged newer checkpoints are renamed, so that their steps can be saved again. A rollback that
    was recorded but not finished is finished first.

    Args:
      run: The run that is trained.
      checkpoints: Its checkpoints.
      rollbacks: Its rollbacks.
      abstract_state: Shapes, dtypes and shardings of the state to restore.
      init: Returns the state before the first step.

    Raises:
      UserError: all checkpoints are damaged, or they do not belong to this run.
    """
    rollbacks.set_aside_later_checkpoints(checkpoints)
    newest, incomplete = checkpoints.find_newest_valid(), checkpoints.incomplete_steps()
    uncommitted = [
        SkippedCheckpoint(step, "has no manifest")
        for step in incomplete
        if step > (newest.step or -1)
    ]
    skipped = sorted([*newest.skipped, *uncommitted], reverse=True)
    best, data_position = BestEvaluation(), None
    if newest.step is not None:
        step = newest.step
        state, metadata = _restore_state(run, checkpoints, step, abstract_state)
        best = BestEvaluation.from_json(metadata.get("best", {}))
        data_position = metadata.get("data_position")
        state = rollbacks.apply(state, metadata)
        set_aside = newest.skipped  # The next save clears incomplete ones away.
    elif newest.skipped or len(uncommitted) > 1:
        raise no_valid_checkpoint_error(checkpoints.directory, skipped)
    else:
        # A single incomplete checkpoint may be the first save of a process that was killed.
        state, step, set_aside = init(), 0, uncommitted
    for checkpoint in set_aside:
        checkpoints.set_aside(checkpoint.step, "damaged")
    return StartPoint(state, step, best, skipped, data_position)


def _restore_state(
    run: RunIdentity, checkpoints: CheckpointManager, step: int, abstract_state: TrainState
) -> RestoredCheckpoint:
    """Restore a checkpoint. Raise UserError if it does not belong to this run."""
    if step > run.experiment.steps:
        raise UserError(
            f"{run.folder.path}: its run is at step {step} already; "
            f"give --steps {step} or more, or another --workdir"
        )
    # Check the metadata before reading arrays: the error about their shapes would help less.
    check_provenance(checkpoints.read_metadata(step), step, run.folder, run.provenance)
    restored = checkpoints.restore(step, abstract_state)
    if restored.metadata.get("corpus") != run.corpus_digest:
        path = run.experiment.data.path
        if reason := explain_library_mismatch(restored.metadata, path):
            raise UserError(
                f"data.path {path}: {reason}; resume {run.folder.path} with that Python, or "
                "give another --workdir"
            )
        raise UserError(
            f"data.path {path}: is not the text that "
            f"{run.folder.path} was trained on; give that text, or another --workdir"
        )
    return restored

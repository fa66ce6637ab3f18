"""Resuming a run: read what its folder holds, check that it can be resumed, restore its state.

A resumed run continues bit for bit. Hence nothing that shapes the result may differ from the saved
run (`check_resumable`), `auto` settings stay what they were (`pin_previous_choices`), and a
checkpoint of other data or settings is refused (`_restore_state`).

The next batch is always that of the state's `cursor`; `step` counts updates. Whose cursor counts:

- killed: that of the newest valid checkpoint; the batches since then are trained on again.
- preempted: that of the checkpoint of its last step; no batch is repeated or left out.
- rolled back: that of the record in `recovery.json`, which lies beyond the batches of the anomaly
  (`RollbackManager.apply`). A checkpoint that was saved after the rollback has it already.

Batches that were read ahead do not count. Of streamed data, a checkpoint also holds where the
stream was at its cursor (`data_position`); it is read on from there.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.checkpoint.manager import (
    NEW_START_REMEDY,
    CheckpointManager,
    RestoredCheckpoint,
    SkippedCheckpoint,
    broadcast_integers,
    no_valid_checkpoint_error,
)
from train.config.io import diff_experiments, forbidden_changes
from train.config.resolve import pin_auto
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.experiment import Experiment
from train.rollback import RollbackManager
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import check_provenance, explain_library_mismatch
from train.run_folder.run_config import (
    read_auto_choices,
    read_experiment,
    read_labels,
    read_tokenizer,
)
from train.state import TrainState
from train.tasks.vocabulary import Labels
from train.telemetry.event_log import EventLog
from train.telemetry.metrics_log import is_step_number
from transformer.hardware import Hardware

_EVENTS_WITH_CHECKPOINT = ("saved", "started", "resumed", "preempted", "finished")
"""Events of the logbook that show that the run had a checkpoint; a `started` that is not `new` is
from a checkpoint of step 0."""


class PreviousRun(NamedTuple):
    """A run that its folder holds already."""

    experiment: Experiment
    tokenizer: Tokenizer | None
    labels: Labels
    auto_choices: dict[str, str]
    """Resolved `auto` settings. Empty if the run began on another kind of hardware."""


def read_previous_run(
    folder: RunFolder, hardware: Hardware, *, from_scratch: bool = False
) -> PreviousRun | None:
    """Return the run of a folder, or None if it has to start at step 0.

    With `from_scratch`, also where no checkpoint is left of those that were saved.

    Raises:
      UserError: The run had a checkpoint, and none is there.
    """
    # Process 0 looks, here too: one that sees another state of a network disk would start anew.
    with CheckpointManager(folder.checkpoints) as checkpoints:
        if from_scratch and checkpoints.find_newest_valid().step is None:
            return None
        if not broadcast_integers(checkpoints.steps()):
            if saved := broadcast_integers(_logged_saves(folder)):
                raise UserError(
                    f"checkpoints {folder.checkpoints}: there is none, but the run saved one at "
                    f"step {max(saved)}; restore it, or train anew: {NEW_START_REMEDY}"
                )
            return None
    experiment = read_experiment(folder)
    return PreviousRun(
        experiment,
        read_tokenizer(folder, experiment),
        read_labels(folder),
        read_auto_choices(folder, hardware),
    )


def _logged_saves(folder: RunFolder) -> list[int]:
    """Return the steps of checkpoints that the logbook tells of, since the run began."""
    steps: list[int] = []
    for line in EventLog(folder.event_log).read():
        if line.get("event") == "started" and line.get("new"):
            steps = []
        elif line.get("event") in _EVENTS_WITH_CHECKPOINT and is_step_number(line.get("step")):
            steps.append(line["step"])
    return steps


def read_final_metrics(folder: RunFolder, step: int) -> dict[str, float] | None:
    """Return the metrics of a run that finished at this step. None if it did not."""
    for line in reversed(EventLog(folder.event_log).read()):
        # An earlier "finished" was of other weights, or of other settings of the evaluation.
        if line.get("event") in ("started", "resumed", "rolled back"):
            return None
        if line.get("event") == "finished" and line.get("step") == step:
            metrics = {name: line[name] for name in line if name not in ("time", "event", "step")}
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # A damaged line.
                return {name: float(value) for name, value in metrics.items()}
    return None


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
    if forbidden := forbidden_changes(changes, requested):
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
    """Newer checkpoints that are damaged, newest first."""
    data_position: Any = None
    """Position in streamed data (`TrainingBatches.position`)."""


def restore_newest(
    run: RunIdentity,
    checkpoints: CheckpointManager,
    rollbacks: RollbackManager,
    *,
    abstract_state: TrainState,
    init: Callable[[], TrainState],
    from_scratch: bool = False,
) -> StartPoint:
    """Restore the newest valid checkpoint, or initialize the state if there is none.

    Damaged newer checkpoints are renamed, so that their steps can be saved again. A rollback that
    was recorded but not finished is finished first. With `from_scratch`, the state is initialized
    also if all checkpoints are damaged.

    Raises:
      UserError: all checkpoints are damaged, or they do not belong to this run.
    """
    rollbacks.set_aside_later_checkpoints(checkpoints)
    newest = checkpoints.find_newest_valid()
    best, data_position = BestEvaluation(), None
    if newest.step is not None:
        step = newest.step
        state, metadata = _restore_state(run, checkpoints, step, abstract_state)
        best = BestEvaluation.from_metadata(metadata)
        data_position = metadata.get("data_position")
        state = rollbacks.apply(state, metadata)
    elif newest.skipped and not from_scratch:
        raise no_valid_checkpoint_error(checkpoints.directory, newest.skipped)
    else:
        state, step = init(), 0
    for checkpoint in newest.skipped:
        checkpoints.set_aside(checkpoint.step, "damaged")
    return StartPoint(state, step, best, newest.skipped, data_position)


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

"""Going on with a run: what its folder says of it, what may differ, the state to go on from."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from train.checkpoint.discovery import SkippedCheckpoint
from train.checkpoint.errors import no_valid_checkpoint_error
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import check_provenance, explain_library_mismatch
from train.config.io import diff_experiments, forbidden_changes
from train.config.resolve import pin_auto
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.early_stopping import BestEvaluation
from train.evaluation.evaluator import Evaluator
from train.experiment import Experiment
from train.recovery.rollback import RollbackManager
from train.run import read_auto_choices, read_experiment
from train.run_folder.folder import RunFolder, set_aside_file
from train.run_folder.run_config import write_run_files
from train.state import TrainState
from train.tasks.vocabulary import Labels, read_labels
from train.telemetry.event_log import EventLog
from transformer.hardware import Hardware


class PreviousRun(NamedTuple):
    """What the folder of a run says of it."""

    experiment: Experiment
    tokenizer: Tokenizer
    labels: Labels
    auto_choices: dict[str, str]
    """What `auto` was, on hardware like this."""


def read_previous_run(folder: RunFolder, hardware: Hardware) -> PreviousRun | None:
    """The run that a folder holds.

    One without a checkpoint has nothing to be true to: it begins anew, as it is asked for.
    """
    with CheckpointManager(folder.checkpoints, read_only=True) as checkpoints:
        if checkpoints.latest_step() is None:
            return None
    return PreviousRun(
        read_experiment(folder),
        Tokenizer.load(folder.tokenizer),
        read_labels(folder),
        read_auto_choices(folder, hardware),
    )


def pin_previous_choices(
    experiment: Experiment, previous: PreviousRun | None, hardware: Hardware
) -> Experiment:
    """The experiment with what `auto` was when its run began, as long as nothing asks anew."""
    if previous is None or experiment.model.remat != previous.experiment.model.remat:
        return experiment
    try:
        return pin_auto(experiment, previous.auto_choices, hardware)
    except ValueError as error:
        raise UserError(f"config.json: chosen.{error}; put the file back as it was") from error


def check_resumable(
    folder: RunFolder, previous: PreviousRun | None, requested: Experiment
) -> dict[str, tuple[Any, Any]]:
    """The settings that are not those of the run: (saved, asked) by name.

    Raises UserError, before anything is written, for one that a run cannot be resumed with.
    """
    found = diff_experiments(previous.experiment, requested) if previous else {}
    if refused := forbidden_changes(found):
        name, (old, new) = next(iter(refused.items()))
        raise UserError(
            f"{folder.path}: its run was trained with {name} = {old}, not {new}"
            f"{f' (and {len(refused) - 1} more differ)' if len(refused) > 1 else ''}; "
            "give another --workdir, or the settings of its config.txt"
        )
    return found


class StartPoint(NamedTuple):
    """Where a run goes on from."""

    state: TrainState
    step: int
    skipped_checkpoints: list[SkippedCheckpoint]


def restore_or_init(
    judge: Evaluator, checkpoints: CheckpointManager, recovery: RollbackManager
) -> StartPoint:
    """The newest state that is as it was saved; the judge is told what was best before.

    Damaged checkpoints that are newer are set aside, so that their steps can be saved again. A
    rollback that was decided is done to its end.

    Raises:
      UserError: no checkpoint can be gone on from, or it is not of this run.
    """
    recovery.set_aside_later_checkpoints(checkpoints)
    found, cut_off = checkpoints.find_newest_valid(), checkpoints.incomplete_steps()
    lost = [
        SkippedCheckpoint(step, "has no manifest") for step in cut_off if step > (found.step or -1)
    ]
    passed_over = sorted([*found.skipped, *lost], reverse=True)
    if found.step is not None:
        state, step = _restored(judge, checkpoints, recovery, found.step), found.step
        aside = found.skipped  # what was cut off is cleared away by the next save
    elif found.skipped or len(lost) > 1:  # one alone may be a first save that was cut off
        raise no_valid_checkpoint_error(checkpoints.directory, passed_over)
    else:
        state, step, aside = judge.engine.init(), 0, lost
    for each in aside:
        checkpoints.set_aside(each.step, "damaged")
    return StartPoint(state, step, passed_over)


def _restored(
    judge: Evaluator, checkpoints: CheckpointManager, recovery: RollbackManager, step: int
) -> TrainState:
    if step > judge.experiment.steps:
        raise UserError(
            f"{judge.folder.path}: its run is at step {step} already; "
            f"give --steps {step} or more, or another --workdir"
        )
    # Before the arrays are read, as shapes that differ would be the less helpful error.
    extra, corpus = checkpoints.read_metadata(step), judge.corpus
    check_provenance(extra, step, judge.folder, judge.experiment, corpus.tokenizer, corpus.labels)
    state = checkpoints.restore(step, judge.engine.abstract_state()).state
    if extra.get("corpus") != corpus.digest:
        path = judge.experiment.data.path
        if why := explain_library_mismatch(extra, path):
            raise UserError(
                f"data.path {path}: {why}; resume {judge.folder.path} with that Python, or give "
                "another --workdir"
            )
        raise UserError(
            f"data.path {path}: is not the text that "
            f"{judge.folder.path} was trained on; give that text, or another --workdir"
        )
    judge.restore_best(BestEvaluation.from_json(extra.get("best", {})), checkpoints)
    return recovery.apply_rollback(state, extra)


def read_final_metrics(folder: RunFolder, step: int) -> dict[str, float] | None:
    """The metrics that a run has had at its end; None if it has not been there."""
    for line in reversed(EventLog(folder.event_log).read()):
        if line.get("event") in ("started", "rolled back"):
            return None  # what was finished before that had other weights
        if line.get("event") == "finished" and line.get("step") == step:
            known = {name: line[name] for name in line if name not in ("time", "event", "step")}
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # of a damaged line
                return {name: float(value) for name, value in known.items()}
    return None


def write_run_config(judge: Evaluator, *, is_new_run: bool) -> None:
    """Write the files of a run's folder that describe it.

    Args:
      judge: Evaluator of the run.
      is_new_run: The run starts from step 0. A rollback record of an earlier run in this folder,
        whose checkpoints are gone, is renamed: a resumed run would take it for its own.
    """
    if is_new_run:
        set_aside_file(judge.folder.rollback_record, "earlier")
    write_run_files(
        judge.folder,
        judge.experiment,
        judge.corpus.tokenizer,
        judge.corpus.labels,
        auto_choices=judge.engine.auto_choices(),
        hardware=judge.engine.model.hardware,
    )

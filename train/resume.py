"""Going on with a run: what its folder says of it, what may differ, the state to go on from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any, NamedTuple

from train.checkpoint.discovery import PassedOver
from train.checkpoint.errors import none_good
from train.checkpoint.manager import Checkpoints
from train.checkpoint.provenance import check_provenance, other_library
from train.config.io import (
    diff_experiments,
    experiment_to_dict,
    experiment_to_text,
    forbidden_changes,
)
from train.config.resolve import pin_auto
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.evaluation.early_stopping import Best
from train.evaluation.evaluator import Judge
from train.experiment import Experiment
from train.recovery.rollback import Recovery
from train.run import Labels, read_auto_choices, read_experiment, read_labels
from train.run_folder.folder import RunFolder, set_aside, write_atomically
from train.state import TrainState
from train.telemetry.event_log import Logbook
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
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
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
    skipped_checkpoints: list[PassedOver]


def restore_or_init(judge: Judge, checkpoints: Checkpoints, recovery: Recovery) -> StartPoint:
    """The newest state that is as it was saved; the judge is told what was best before.

    Damaged checkpoints that are newer are set aside, so that their steps can be saved again. A
    rollback that was decided is done to its end.

    Raises:
      UserError: no checkpoint can be gone on from, or it is not of this run.
    """
    recovery.clear(checkpoints)
    found, cut_off = checkpoints.newest_good(), checkpoints.cut_off()
    lost = [PassedOver(step, "has no manifest") for step in cut_off if step > (found.step or -1)]
    passed_over = sorted([*found.passed_over, *lost], reverse=True)
    if found.step is not None:
        state, step = _restored(judge, checkpoints, recovery, found.step), found.step
        aside = found.passed_over  # what was cut off is cleared away by the next save
    elif found.passed_over or len(lost) > 1:  # one alone may be a first save that was cut off
        raise none_good(checkpoints.directory, passed_over)
    else:
        state, step, aside = judge.engine.init(), 0, lost
    for each in aside:
        checkpoints.set_aside(each.step, "damaged")
    return StartPoint(state, step, passed_over)


def _restored(judge: Judge, checkpoints: Checkpoints, recovery: Recovery, step: int) -> TrainState:
    if step > judge.experiment.steps:
        raise UserError(
            f"{judge.folder.path}: its run is at step {step} already; "
            f"give --steps {step} or more, or another --workdir"
        )
    # Before the arrays are read, as shapes that differ would be the less helpful error.
    extra, corpus = checkpoints.extra(step), judge.corpus
    check_provenance(extra, step, judge.folder, judge.experiment, corpus.tokenizer, corpus.labels)
    state = checkpoints.restore(step, judge.engine.abstract_state()).state
    if extra.get("corpus") != corpus.digest:
        path = judge.experiment.data.path
        if why := other_library(extra, path):
            raise UserError(
                f"data.path {path}: {why}; resume {judge.folder.path} with that Python, or give "
                "another --workdir"
            )
        raise UserError(
            f"data.path {path}: is not the text that "
            f"{judge.folder.path} was trained on; give that text, or another --workdir"
        )
    judge.remember(Best.from_plain(extra.get("best", {})), checkpoints)
    return recovery.applied(state, extra)


def read_final_metrics(folder: RunFolder, step: int) -> dict[str, float] | None:
    """The metrics that a run has had at its end; None if it has not been there."""
    for line in reversed(Logbook(folder.logbook).read()):
        if line.get("event") in ("started", "rolled back"):
            return None  # what was finished before that had other weights
        if line.get("event") == "finished" and line.get("step") == step:
            known = {name: line[name] for name in line if name not in ("time", "event", "step")}
            with contextlib.suppress(TypeError, ValueError, OverflowError):  # of a damaged line
                return {name: float(value) for name, value in known.items()}
    return None


def write_run_config(judge: Judge, *, is_new_run: bool) -> None:
    """Write all of a run's folder that another program needs beside the weights.

    config.json comes last: a folder that has it holds a run.

    Args:
      judge: Of the run.
      anew: The run begins here: the rollbacks of an earlier one, whose checkpoints are gone, are
        moved aside, as they would be taken for its own when it is resumed.
    """
    if is_new_run:
        set_aside(judge.folder.recovery, "earlier")
    folder, corpus, hardware = judge.folder, judge.corpus, judge.engine.model.hardware
    chosen = judge.engine.auto_choices()
    plain = {
        "experiment": experiment_to_dict(judge.experiment),
        "chosen": chosen,
        "hardware": dataclasses.asdict(hardware),
    }
    lines = "".join(f"# auto: {name} = {choice}\n" for name, choice in chosen.items())
    write_atomically(folder.tokenizer, corpus.tokenizer.to_json())
    if corpus.labels:
        names = json.dumps(corpus.labels, ensure_ascii=False)
        write_atomically(folder.labels, names + "\n")
    write_atomically(folder.config_text, experiment_to_text(judge.experiment) + lines)
    write_atomically(folder.config_json, json.dumps(plain, indent=1) + "\n")

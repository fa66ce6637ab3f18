"""Going on with a run: what its folder says of it, what may differ, the state to go on from."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from train.checkpoints import Checkpoints
from train.data import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.judge import Judge
from train.logbook import Logbook
from train.run import saved_experiment, saved_labels
from train.runfolder import RunFolder, write_atomically
from train.settings import as_text, changes, forbidden, to_plain
from train.state import TrainState
from train.stopping import Best
from train.tasks.task import Labels


class Begun(NamedTuple):
    """What the folder of a run says of it."""

    experiment: Experiment
    tokenizer: Tokenizer
    labels: Labels


def begun(folder: RunFolder) -> Begun | None:
    """The run that a folder holds.

    One without a checkpoint has nothing to be true to: it begins anew, as it is asked for.
    """
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        if checkpoints.latest_step() is None:
            return None
    tokenizer = Tokenizer.load(folder.tokenizer)
    return Begun(saved_experiment(folder), tokenizer, saved_labels(folder))


def differences(
    folder: RunFolder, before: Begun | None, asked: Experiment
) -> dict[str, tuple[Any, Any]]:
    """The settings that are not those of the run: (saved, asked) by name.

    Raises UserError, before anything is written, for one that a run cannot be resumed with.
    """
    found = changes(before.experiment, asked) if before else {}
    if refused := forbidden(found):
        name, (old, new) = next(iter(refused.items()))
        raise UserError(
            f"{folder.path}: its run was trained with {name} = {old}, not {new}"
            f"{f' (and {len(refused) - 1} more differ)' if len(refused) > 1 else ''}; "
            "give another --workdir, or the settings of its config.txt"
        )
    return found


def start(judge: Judge, checkpoints: Checkpoints) -> tuple[TrainState, int]:
    """The state to go on from, and its step; the judge is told what was best before."""
    latest = checkpoints.latest_step()
    if latest is None:
        return judge.engine.init(), 0
    if latest > judge.experiment.steps:
        raise UserError(
            f"{judge.folder.path}: its run is at step {latest} already; "
            f"give --steps {latest} or more, or another --workdir"
        )
    state, extra = checkpoints.restore(latest, judge.engine.shapes())
    if extra.get("corpus") != judge.corpus.digest:
        raise UserError(
            f"data.path {judge.experiment.data.path}: is not the text that "
            f"{judge.folder.path} was trained on; give that text, or another --workdir"
        )
    judge.remember(Best.from_plain(extra.get("best", {})), checkpoints)
    return state, latest


def finished_before(folder: RunFolder, step: int) -> dict[str, float] | None:
    """The metrics that a run has had at its end; None if it has not been there."""
    for line in reversed(Logbook(folder.logbook).read()):
        if line.get("event") == "finished" and line.get("step") == step:
            known = {name: line[name] for name in line if name not in ("time", "event", "step")}
            return {name: float(value) for name, value in known.items()}
    return None


def write_settings(judge: Judge) -> None:
    """All of a run's folder that another program needs beside the weights.

    config.json comes last: a folder that has it holds a run.
    """
    folder, corpus, chosen = judge.folder, judge.corpus, judge.engine.choices()
    plain = {"experiment": to_plain(judge.experiment), "chosen": chosen}
    lines = "".join(f"# auto: {name} = {choice}\n" for name, choice in chosen.items())
    write_atomically(folder.tokenizer, corpus.tokenizer.to_json())
    if corpus.labels:
        names = json.dumps(corpus.labels, ensure_ascii=False)
        write_atomically(folder.labels, names + "\n")
    write_atomically(folder.config_text, as_text(judge.experiment) + lines)
    write_atomically(folder.config_json, json.dumps(plain, indent=1) + "\n")

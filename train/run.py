"""A run that was trained: its model, weights and tokenizer, read from its folder."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.experiment import Experiment
from train.runfolder import RunFolder, reading
from train.settings import from_plain

if TYPE_CHECKING:
    from train.data import Tokenizer
    from train.tasks.task import Labels
    from transformer.hardware import Hardware
    from transformer.model import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a run has come to."""

    experiment: Experiment
    """As resolved: with the size of the vocabulary."""
    folder: RunFolder
    model: Model
    params: Any
    tokenizer: Tokenizer
    step: int
    """Updates that the weights have had."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The held-out metrics at the end of `fit`; empty for a run that was loaded."""
    labels: Labels = ()
    """The names of the classes or tags, by number."""


def saved_experiment(folder: RunFolder) -> Experiment:
    """The experiment of a run's folder. Raises UserError if its file is damaged."""
    return from_plain(_saved(folder, "experiment"), str(folder.config_json))


def saved_choices(folder: RunFolder, hardware: Hardware) -> dict[str, str]:
    """What every `auto` has become in a run, if it ran on hardware of this kind; else nothing."""
    kind = _saved(folder, "hardware")
    if (kind.get("platform"), kind.get("kind")) != (hardware.platform, hardware.kind):
        return {}
    chosen = _saved(folder, "chosen")
    return {name: choice for name, choice in chosen.items() if isinstance(choice, str)}


def _saved(folder: RunFolder, part: str) -> dict[str, Any]:
    """A part of config.json. Raises UserError if it is damaged."""
    with reading(folder.config_json):
        data = folder.config_json.read_bytes()
    try:
        plain = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{folder.config_json}: is not JSON ({error}); put the file back as it was"
        ) from error
    found = plain.get(part) if isinstance(plain, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{folder.config_json}: has no {part} in it; put the file back as it was")
    return found


def saved_labels(folder: RunFolder) -> Labels:
    """The names of a run's classes or tags; none of a run that has no such."""
    with reading(folder.labels):
        if not folder.labels.exists():
            return ()
        data = folder.labels.read_bytes()
    try:
        names = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{folder.labels}: is not JSON ({error}); put the file back as it was"
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is no list of names; put the file back as it was")
    return tuple(names)


def load(workdir: str, *, step: int | None = None, average: int | None = None) -> Run:
    """Reads a run, with the weights that it is judged by.

    Args:
      workdir: The run's folder.
      step: Which checkpoint. If not given: what the run's settings say, the newest unless they ask
        for the best one or for a mean.
      average: The mean of so many checkpoints, `step` or the newest and those before it.

    Raises:
      UserError: there is no run, no such checkpoint, or it does not fit the run's model.
    """
    from train.checkpoints import Checkpoints
    from train.data import Tokenizer
    from train.engine import make_engine
    from train.hardware import local_hardware
    from train.served import serve
    from train.tasks.vocabulary import check_vocabulary

    folder = RunFolder.existing(workdir)
    hardware = local_hardware()
    experiment = one_host(saved_experiment(folder))
    tokenizer = Tokenizer.load(folder.tokenizer)
    check_vocabulary(experiment, tokenizer, str(folder.tokenizer))
    engine = make_engine(experiment, hardware)
    verify = experiment.checkpoint.verify
    with Checkpoints(folder.checkpoints, read_only=True, verify=verify) as checkpoints:
        params, steps = serve(checkpoints, engine, experiment, step=step, average=average)
    labels = saved_labels(folder)
    return Run(experiment, folder, engine.model, params, tokenizer, steps[-1], labels=labels)


def one_host(experiment: Experiment) -> Experiment:
    """The experiment on whatever devices are here: a run is often looked at elsewhere."""
    from train.sharding import MeshConfig

    return dataclasses.replace(
        experiment,
        mesh=MeshConfig(),
        compile="jit",
        accumulate=1,
    )

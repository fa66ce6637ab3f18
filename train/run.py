"""The names of a run's classes or tags, by number.

A run that was trained: its model, weights and tokenizer, read from its folder.

A run read from its folder, with the weights that it is judged by.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from train.config.io import experiment_from_dict
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder, explain_read_errors, read_json
from train.run_folder.regular_files import MAX_VOCABULARY_BYTES

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from transformer.hardware import Hardware
    from transformer.models.base import Model

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import check_provenance
from train.data.tokenizer import Tokenizer
from train.engine import make_engine
from train.evaluation.eval_weights import load_eval_weights
from train.parallel.mesh import MeshConfig
from train.runtime.attention_kernels import mark_broken_kernels
from train.runtime.hardware import local_hardware
from train.tasks.registry import check_vocab_size

Labels = tuple[str, ...]


def read_labels(folder: RunFolder) -> Labels:
    """The names of a run's classes or tags; none of a run that has no such."""
    with explain_read_errors(folder.labels):
        try:
            folder.labels.stat()  # not `exists`, which takes a loop of links for no file
        except FileNotFoundError:
            return ()
    names = read_json(folder.labels, MAX_VOCABULARY_BYTES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is no list of names; put the file back as it was")
    return tuple(names)


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


def read_experiment(folder: RunFolder) -> Experiment:
    """The experiment of a run's folder. Raises UserError if its file is damaged."""
    return experiment_from_dict(_saved(folder, "experiment"), str(folder.config_json))


def read_auto_choices(folder: RunFolder, hardware: Hardware) -> dict[str, str]:
    """What every `auto` has become in a run, if it ran on hardware of this kind; else nothing."""
    kind = _saved(folder, "hardware")
    if (kind.get("platform"), kind.get("kind")) != (hardware.platform, hardware.kind):
        return {}
    chosen = _saved(folder, "chosen")
    return {name: choice for name, choice in chosen.items() if isinstance(choice, str)}


def _saved(folder: RunFolder, part: str) -> dict[str, Any]:
    """A part of config.json. Raises UserError if it is damaged."""
    plain = read_json(folder.config_json)
    found = plain.get(part) if isinstance(plain, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{folder.config_json}: has no {part} in it; put the file back as it was")
    return found


def load(workdir: str, *, step: int | None = None, average_checkpoints: int | None = None) -> Run:
    """Reads a run, with the weights that it is judged by.

    Args:
      workdir: The run's folder.
      step: Which checkpoint. If not given: what the run's settings say, the newest unless they ask
        for the best one or for a mean.
      average: The mean of so many checkpoints, `step` or the newest and those before it.

    Raises:
      UserError: there is no run, no such checkpoint, or it does not fit the run's model.
    """
    folder = RunFolder.open_existing(workdir)
    hardware = local_hardware()
    saved = read_experiment(folder)
    experiment = for_local_devices(saved)
    tokenizer, labels = Tokenizer.load(folder.tokenizer), read_labels(folder)
    check_vocab_size(experiment, tokenizer, str(folder.tokenizer))
    engine = make_engine(experiment, mark_broken_kernels(experiment, hardware))
    verify = experiment.checkpoint.verify

    def check(step: int, extra: dict[str, Any]) -> None:
        check_provenance(extra, step, folder, saved, tokenizer, labels)

    with CheckpointManager(folder.checkpoints, read_only=True, verify=verify) as checkpoints:
        params, steps = load_eval_weights(
            checkpoints,
            engine,
            experiment,
            step=step,
            average_checkpoints=average_checkpoints,
            check=check,
        )
    return Run(experiment, folder, engine.model, params, tokenizer, steps[-1], labels=labels)


def for_local_devices(experiment: Experiment) -> Experiment:
    """The experiment on whatever devices are here: a run is often looked at elsewhere."""
    model = experiment.model
    if model.remat == "offload":  # a CPU has no other memory, and nothing is differentiated here
        model = dataclasses.replace(model, remat="none")
    return dataclasses.replace(
        experiment,
        model=model,
        mesh=MeshConfig(),
        compile="jit",
        grad_accum_steps=1,
    )

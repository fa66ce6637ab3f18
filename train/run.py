"""A run that was trained: its model, weights and tokenizer, read from its folder."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.experiment import Experiment
from train.labels import Labels
from train.runfolder import RunFolder, read_json
from train.settings import experiment_from_dict

if TYPE_CHECKING:
    from train.data import Tokenizer
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

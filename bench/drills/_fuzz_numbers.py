"""Sweep over the numbers of all settings: every integer and float at extreme values."""

import copy
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench.drills._fuzz_models import kind_options, put
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import experiment_from_dict, experiment_to_dict
from train.errors import UserError
from train.estimate.describe import describe
from train.experiment import Experiment

INTEGERS = (-(2**63), -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**40)
FLOATS = (float("inf"), float("-inf"), float("nan"), 1e308, -1e308, -0.0)

Use = Callable[[pathlib.Path], object]


class Case(NamedTuple):
    """One input, and its use in an empty folder."""

    name: str
    use: Use


def numbers() -> Iterator[Case]:
    """Yield every integer and float of every config, set to extreme values."""
    seen: set[tuple[str, str]] = set()
    tried: set[type] = set()
    files = sorted({name.partition(":")[0] for name in list_experiments()})
    for base in (shallow(find_experiment(name)) for name in files):
        for experiment in itertools.chain([base], other_kinds(base, tried)):
            plain = experiment_to_dict(experiment)
            for kind, path, value in numbers_of(experiment):
                key = kind, path.rpartition(".")[2]
                if key in seen:
                    continue
                seen.add(key)
                for other in INTEGERS if isinstance(value, int) else FLOATS:
                    yield Case(f"{kind}: {path} = {other}", described(plain, path, other))


def shallow(experiment: Experiment) -> Experiment:
    """Return the experiment with each block once, which traces faster."""
    model = experiment.model
    model = dataclasses.replace(model, num_layers=len(model.layer_pattern))
    if model.encoder is not None:
        encoder = dataclasses.replace(model.encoder, num_layers=len(model.encoder.layer_pattern))
        model = dataclasses.replace(model, encoder=encoder)
    return dataclasses.replace(experiment, model=model)


def other_kinds(base: Experiment, tried: set[type], within: str = "") -> Iterator[Experiment]:
    """Yield the experiment with each part replaced by each other kind, recursively.

    Args:
      base: The experiment.
      tried: Kinds to skip; those that are tried are added.
      within: Change only parts of the part of this name.
    """
    for path, known in kind_options(base):
        for kind, current_kind in known.items() if path.startswith(within) else ():
            if current_kind in tried:
                continue
            plain = experiment_to_dict(base)
            put(plain, path, {"kind": kind})
            try:
                other_experiment = experiment_from_dict(plain, "an experiment")
            except UserError:
                continue
            tried.add(current_kind)
            yield other_experiment
            yield from other_kinds(other_experiment, tried, f"{path}.")


def numbers_of(config: Any, path: str = "") -> Iterator[tuple[str, str, int | float]]:
    """Yield (class, dotted name, value) of every number."""
    if isinstance(config, tuple):
        for index, each in enumerate(config):
            yield from numbers_of(each, f"{path}.{index}")
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield type(config).__name__, name, value
            else:
                yield from numbers_of(value, name)


def described(plain: dict[str, Any], path: str, value: float) -> Use:
    def use(folder: pathlib.Path) -> None:
        changed = copy.deepcopy(plain)
        put(changed, path, value)
        describe(experiment_from_dict(changed, "an experiment"))

    return use

"""Experiments by name: the files of `configs/`, or a Python file of the user."""

import dataclasses
import importlib
import pkgutil
from types import ModuleType

from train.config.plugins import import_file
from train.errors import UsageError
from train.experiment import Experiment


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    A config file holds a dict `EXPERIMENTS` of experiments by name. It is executed as Python: load
    only files that you trust.

    Args:
      name: `gpt2` (the first experiment of a shipped file), `gpt2:medium`, or
        `path/to/file.py[:experiment]`.

    Raises:
      UsageError: there is no such config, or no such experiment in it.
    """
    file, _, experiment = name.partition(":")
    experiments = _load_experiments(file)
    if not experiment:
        return next(iter(experiments.values()))
    if experiment not in experiments:
        raise UsageError(
            f"config {name}: {file} has no experiment {experiment}; "
            f"choose one of {', '.join(experiments)}"
        )
    return experiments[experiment]


def list_experiments() -> list[str]:
    """Return the names of all shipped experiments, as `file:experiment`."""
    return [f"{file}:{name}" for file in _shipped_files() for name in _load_experiments(file)]


@dataclasses.dataclass(frozen=True)
class ShippedConfig:
    """A file of `configs/`."""

    name: str
    summary: str
    """First line of its docstring."""
    experiments: tuple[str, ...]
    """Names of its experiments; the first is the default."""


def describe_shipped() -> list[ShippedConfig]:
    """Return all shipped config files, by name."""
    return [
        ShippedConfig(
            file,
            (_import_shipped(file).__doc__ or "").partition("\n")[0],
            tuple(_load_experiments(file)),
        )
        for file in _shipped_files()
    ]


def _shipped_files() -> list[str]:
    # `configs` imports `train`: the only import against that direction, made when it is needed.
    import configs

    return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def _load_experiments(file: str) -> dict[str, Experiment]:
    module = import_file(file, f"config {file}") if file.endswith(".py") else _import_shipped(file)
    experiments = getattr(module, "EXPERIMENTS", None)
    if not isinstance(experiments, dict) or not experiments:
        raise UsageError(
            f"config {file}: defines no EXPERIMENTS; set it to a dict of experiments by name"
        )
    return experiments


def _import_shipped(file: str) -> ModuleType:
    known = _shipped_files()
    if file not in known:
        raise UsageError(
            f"config {file}: is not known; choose one of {', '.join(known)}, "
            "or give the path of a .py file"
        )
    return importlib.import_module(f"configs.{file}")

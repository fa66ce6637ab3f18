"""The trainer: `fit` an experiment, `load` what it has come to."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.experiment import Experiment
    from train.loop import fit
    from train.run import Run, load

_HOMES = {"Experiment": "experiment", "Run": "run", "fit": "loop", "load": "run"}

__all__ = ["Experiment", "Run", "fit", "load"]


def __getattr__(name: str) -> Any:
    """Imports each on first use: the command line answers for help before jax is loaded."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"train.{_HOMES[name]}"), name)

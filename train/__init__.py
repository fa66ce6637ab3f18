"""The trainer. `fit` trains an experiment, `load` reads a trained run.

import train
run = train.fit(experiment, "runs/mine")
run = train.load("runs/mine")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.experiment import Experiment
    from train.loop import fit
    from train.optim.registry import register_optimizer
    from train.optim.schedules import register_schedule
    from train.run import Run, load
    from train.tasks.registry import register_dataset, register_task

_MODULES = {
    "Experiment": "experiment",
    "Run": "run",
    "fit": "loop",
    "load": "run",
    "register_dataset": "tasks.registry",
    "register_optimizer": "optim.registry",
    "register_schedule": "optim.schedules",
    "register_task": "tasks.registry",
}

__all__ = [
    "Experiment",
    "Run",
    "fit",
    "load",
    "register_dataset",
    "register_optimizer",
    "register_schedule",
    "register_task",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `--help` does not wait for JAX to load."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"train.{_MODULES[name]}"), name)

"""Registry of tasks: one entry names the settings and the implementation of a task.

The implementation (data, model, loss, evaluation and answers: see `train.tasks.base.Task`) is
imported when a task is first made, so that settings can be read and listed without JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from train.tasks.config import (
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    Tagging,
    TaskConfig,
    Translation,
)

if TYPE_CHECKING:
    from train.data.config import DataConfig
    from train.experiment import Experiment
    from train.tasks.base import Task


class TaskEntry(NamedTuple):
    """A task of the registry."""

    config: type[TaskConfig]
    """Class of its settings, `Experiment.task`."""
    implementation: str | Callable[[Experiment], Task]
    """Class of the task, or "module:Class" to import it on first use."""

    def make(self, experiment: Experiment) -> Task:
        """Return the task of an experiment, imported now if the entry only names its class."""
        make = self.implementation
        if isinstance(make, str):
            module, _, name = make.partition(":")
            make = getattr(importlib.import_module(module), name)
        task: Task = make(experiment)
        return task


TASKS: dict[str, TaskEntry] = {
    entry.config.__name__: entry
    for entry in (
        TaskEntry(LanguageModeling, "train.tasks.language_model:LanguageModelTask"),
        TaskEntry(MaskedLanguageModeling, "train.tasks.masked_lm:MaskedLanguageModelTask"),
        TaskEntry(Classification, "train.tasks.classification:ClassificationTask"),
        TaskEntry(Tagging, "train.tasks.classification:TaggingTask"),
        TaskEntry(Translation, "train.tasks.translation:TranslationTask"),
    )
}
"""Every task by its kind, the name of its settings class. Add your own with `register_task`."""


def register_task(
    config: type[TaskConfig], implementation: str | Callable[[Experiment], Task]
) -> None:
    """Add a task, so that experiments with these settings can be trained, saved and loaded.

    Args:
      config: Its settings, a frozen dataclass. Its data settings become known with it.
      implementation: The class of the task, or "module:Class" to import it on first use.
    """
    TASKS[config.__name__] = TaskEntry(config, implementation)


def make_task(experiment: Experiment) -> Task:
    """Return the task that an experiment trains."""
    return TASKS[type(experiment.task).__name__].make(experiment)


def task_configs() -> dict[str, type[TaskConfig]]:
    """Return the settings class of every task by kind."""
    return {kind: entry.config for kind, entry in TASKS.items()}


def data_configs() -> dict[str, type[DataConfig]]:
    """Return the settings class of every kind of data that some task accepts, by class name."""
    return {each.__name__: each for entry in TASKS.values() for each in entry.config.data_configs}

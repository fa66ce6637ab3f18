"""Registry of tasks: one entry names the settings and the implementation of a task.

The implementation (data, model, loss, evaluation and answers: see `train.tasks.task.Task`) is
imported when a task is first made, so that settings can be read and listed without JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from train.tasks.task_configs import (
    Classification,
    FeatureClassification,
    InstructionTuning,
    LanguageModeling,
    MaskedLanguageModeling,
    PreferenceOptimization,
    Tagging,
    TaskConfig,
    Translation,
)
from transformer.registration import check_kind_is_free, check_registration

if TYPE_CHECKING:
    from train.data.data_config import DataConfig
    from train.experiment import Experiment
    from train.tasks.task import Task


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
        TaskEntry(LanguageModeling, "train.tasks.language_modeling:LanguageModelTask"),
        TaskEntry(InstructionTuning, "train.tasks.instruction:InstructionTask"),
        TaskEntry(PreferenceOptimization, "train.tasks.preference:PreferenceTask"),
        TaskEntry(
            MaskedLanguageModeling, "train.tasks.masked_language_modeling:MaskedLanguageModelTask"
        ),
        TaskEntry(Classification, "train.tasks.classification:ClassificationTask"),
        TaskEntry(
            FeatureClassification, "train.tasks.feature_classification:FeatureClassificationTask"
        ),
        TaskEntry(Tagging, "train.tasks.classification:TaggingTask"),
        TaskEntry(Translation, "train.tasks.translation:TranslationTask"),
    )
}
"""Every task by its kind, the name of its settings class. Add your own with `register_task`."""


TaskClass = TypeVar("TaskClass", bound="Callable[[Experiment], Task]")
"""Type variable: a task class, which a decorator returns as it is."""


@overload
def register_task(config: type[TaskConfig]) -> Callable[[TaskClass], TaskClass]: ...
@overload
def register_task(config: type[TaskConfig], implementation: str | TaskClass) -> None: ...
def register_task(
    config: type[TaskConfig], implementation: str | TaskClass | None = None
) -> Callable[[TaskClass], TaskClass] | None:
    """Register a task, so that experiments with these settings can be trained, saved and loaded.

        @register_task(Regression)
        class RegressionTask(Task): ...

    Args:
      config: Its settings, a frozen dataclass, saved under the name of the class. Its data settings
        become known with it.
      implementation: Without it, this is the decorator of the task's class. With "module:Class",
        the class is imported on first use.

    Raises:
      ValueError: The settings cannot be saved, or their name belongs to another task.
    """
    kind = getattr(config, "__name__", "")
    check_registration("task", kind, config)
    old = TASKS.get(kind)
    check_kind_is_free("task", kind, config, old and old.config)

    def register(task: TaskClass) -> TaskClass:
        TASKS[kind] = TaskEntry(config, task)
        return task

    if implementation is None:
        return register
    TASKS[kind] = TaskEntry(config, implementation)
    return None


DATASETS: dict[str, type[DataConfig]] = {}
"""Datasets of the user by kind, the name of the class. Shipped ones are named by their tasks."""

DatasetClass = TypeVar("DatasetClass", bound="type[DataConfig]")
"""Type variable: a class of settings, which a decorator returns as it is."""


def register_dataset(dataset: DatasetClass) -> DatasetClass:
    """Register a dataset under the name of its class. A class decorator, above `dataclass`.

    It derives from the data settings of the task that learns from it, such as `TextDataConfig`, and
    overrides `read_split`.

    Raises:
      ValueError: It cannot be saved, or its name belongs to another dataset.
    """
    kind = getattr(dataset, "__name__", "")
    check_registration("dataset", kind, dataset)
    check_kind_is_free("dataset", kind, dataset, data_configs().get(kind))
    DATASETS[kind] = dataset
    return dataset


def make_task(experiment: Experiment) -> Task:
    """Return the task that an experiment trains."""
    return TASKS[type(experiment.task).__name__].make(experiment)


def task_configs() -> dict[str, type[TaskConfig]]:
    """Return the settings class of every task by kind."""
    return {kind: entry.config for kind, entry in TASKS.items()}


def data_configs() -> dict[str, type[DataConfig]]:
    """Return the settings class of every kind of data that some task accepts, by class name."""
    accepted = (each for entry in TASKS.values() for each in entry.config.data_configs)
    return {each.__name__: each for each in accepted} | DATASETS

"""Registry of tasks and of their data, and registration of your own."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from train.data.data_config import DataConfig
from train.tasks.classification import (
    Classification,
    ClassificationTask,
    Tagging,
    TaggingTask,
)
from train.tasks.feature_classification import FeatureClassification, FeatureClassificationTask
from train.tasks.instruction import InstructionTask, InstructionTuning
from train.tasks.language_modeling import LanguageModeling, LanguageModelTask
from train.tasks.masked_language_modeling import MaskedLanguageModeling, MaskedLanguageModelTask
from train.tasks.preference import PreferenceOptimization, PreferenceTask
from train.tasks.question_answering import QuestionAnswering, QuestionAnsweringTask
from train.tasks.task import Task, TaskConfig
from train.tasks.translation import Translation, TranslationTask
from transformer.models.config import TransformerConfig
from transformer.registration import check_kind_is_free, check_registration

MakeTask = Callable[[Any, TransformerConfig, Any], Task]
"""Class of a task: a function of the settings of the task, the model and the data."""


class TaskEntry(NamedTuple):
    """A task of the registry."""

    config: type[TaskConfig]
    """Class of its settings, `Experiment.task`."""
    make: MakeTask


TASKS: dict[str, TaskEntry] = {
    config.__name__: TaskEntry(config, task)
    for config, task in (
        (LanguageModeling, LanguageModelTask),
        (InstructionTuning, InstructionTask),
        (PreferenceOptimization, PreferenceTask),
        (MaskedLanguageModeling, MaskedLanguageModelTask),
        (Classification, ClassificationTask),
        (FeatureClassification, FeatureClassificationTask),
        (Tagging, TaggingTask),
        (QuestionAnswering, QuestionAnsweringTask),
        (Translation, TranslationTask),
    )
}
"""Every task by its kind, the name of its settings class. Add your own with `register_task`."""

TaskClass = TypeVar("TaskClass", bound=MakeTask)
"""Type variable: a task class, which a decorator returns as it is."""


def register_task(config: type[TaskConfig]) -> Callable[[TaskClass], TaskClass]:
    """Register a task, so that experiments with these settings can be trained, saved and loaded.

        @register_task(Regression)
        class RegressionTask(Task): ...

    Args:
      config: Its settings, a frozen dataclass, saved under the name of the class. Its data settings
        become known with it.

    Returns:
      The decorator of the task's class.

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

    return register


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


def task_configs() -> dict[str, type[TaskConfig]]:
    """Return the settings class of every task by kind."""
    return {kind: entry.config for kind, entry in TASKS.items()}


def data_configs() -> dict[str, type[DataConfig]]:
    """Return the settings class of every kind of data that some task accepts, by class name."""
    accepted = (each for entry in TASKS.values() for each in entry.config.data_configs)
    return {each.__name__: each for each in accepted} | DATASETS

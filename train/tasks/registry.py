"""Every task by its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.tasks.classification import ClassificationTask
from train.tasks.config import (
    Classification,
    LanguageModelling,
    MaskedLanguageModelling,
    Tagging,
    Translation,
)
from train.tasks.language import LanguageTask
from train.tasks.masked import MaskedTask
from train.tasks.tagging import TaggingTask
from train.tasks.task import Task
from train.tasks.translation import TranslationTask

if TYPE_CHECKING:
    from train.experiment import Experiment

TASKS: dict[type, Any] = {
    LanguageModelling: LanguageTask,
    MaskedLanguageModelling: MaskedTask,
    Classification: ClassificationTask,
    Tagging: TaggingTask,
    Translation: TranslationTask,
}
"""To add a task: its settings in `config.py`, its file, and a line here."""


def make_task(experiment: Experiment) -> Task:
    """The task of an experiment."""
    task: Task = TASKS[type(experiment.task)](experiment)
    return task

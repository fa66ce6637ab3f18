"""The model's vocabulary is the tokenizer's, and its classes are those of the data.

Every task by its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.experiment import Experiment
    from train.tasks.config import Classification, Tagging
from typing import TYPE_CHECKING, Any

from train.tasks.base import Task
from train.tasks.classification import ClassificationTask
from train.tasks.config import (
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    Tagging,
    Translation,
)
from train.tasks.language_model import LanguageModelTask
from train.tasks.masked_lm import MaskedLanguageModelTask
from train.tasks.tagging import TaggingTask
from train.tasks.translation import TranslationTask

if TYPE_CHECKING:
    from train.experiment import Experiment

TASKS: dict[type, Any] = {
    LanguageModeling: LanguageModelTask,
    MaskedLanguageModeling: MaskedLanguageModelTask,
    Classification: ClassificationTask,
    Tagging: TaggingTask,
    Translation: TranslationTask,
}
"""To add a task: its settings in `config.py`, its file, and a line here."""


def make_task(experiment: Experiment) -> Task:
    """The task of an experiment."""
    task: Task = TASKS[type(experiment.task)](experiment)
    return task

"""The trainer. `fit` trains an experiment, `load` reads a trained run.

import train
run = train.fit(experiment, "runs/mine")
run = train.load("runs/mine")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config.experiment_files import find_experiment as find_experiment
    from train.data.bitext import BitextDataConfig as BitextDataConfig
    from train.data.conversations import ConversationDataConfig as ConversationDataConfig
    from train.data.data_config import TextDataConfig as TextDataConfig
    from train.data.data_config import TokenizerConfig as TokenizerConfig
    from train.data.features import FeatureDataConfig as FeatureDataConfig
    from train.data.listops import ListOpsDataConfig as ListOpsDataConfig
    from train.data.preferences import PreferenceDataConfig as PreferenceDataConfig
    from train.data.question_answers import (
        QuestionAnsweringDataConfig as QuestionAnsweringDataConfig,
    )
    from train.data.text_labels import ClassificationDataConfig as ClassificationDataConfig
    from train.data.token_labels import TokenLabelDataConfig as TokenLabelDataConfig
    from train.engines.lora import LoRAConfig as LoRAConfig
    from train.errors import UserError as UserError
    from train.experiment import Experiment as Experiment
    from train.fitting import fit as fit
    from train.optim.optimizer_registry import register_optimizer as register_optimizer
    from train.optim.schedules import register_schedule as register_schedule
    from train.run import Run as Run
    from train.run import load as load
    from train.tasks.classification import Classification as Classification
    from train.tasks.classification import Tagging as Tagging
    from train.tasks.feature_classification import FeatureClassification as FeatureClassification
    from train.tasks.instruction import InstructionTuning as InstructionTuning
    from train.tasks.language_modeling import LanguageModeling as LanguageModeling
    from train.tasks.masked_language_modeling import (
        MaskedLanguageModeling as MaskedLanguageModeling,
    )
    from train.tasks.preference import PreferenceOptimization as PreferenceOptimization
    from train.tasks.question_answering import QuestionAnswering as QuestionAnswering
    from train.tasks.registry import register_dataset as register_dataset
    from train.tasks.registry import register_task as register_task
    from train.tasks.translation import Translation as Translation

_MODULES = {
    "BitextDataConfig": "data.bitext",
    "Classification": "tasks.classification",
    "ClassificationDataConfig": "data.text_labels",
    "ConversationDataConfig": "data.conversations",
    "Experiment": "experiment",
    "FeatureClassification": "tasks.feature_classification",
    "FeatureDataConfig": "data.features",
    "InstructionTuning": "tasks.instruction",
    "LanguageModeling": "tasks.language_modeling",
    "ListOpsDataConfig": "data.listops",
    "LoRAConfig": "engines.lora",
    "MaskedLanguageModeling": "tasks.masked_language_modeling",
    "PreferenceDataConfig": "data.preferences",
    "PreferenceOptimization": "tasks.preference",
    "QuestionAnswering": "tasks.question_answering",
    "QuestionAnsweringDataConfig": "data.question_answers",
    "Run": "run",
    "Tagging": "tasks.classification",
    "TextDataConfig": "data.data_config",
    "TokenLabelDataConfig": "data.token_labels",
    "TokenizerConfig": "data.data_config",
    "Translation": "tasks.translation",
    "UserError": "errors",
    "find_experiment": "config.experiment_files",
    "fit": "fitting",
    "load": "run",
    "register_dataset": "tasks.registry",
    "register_optimizer": "optim.optimizer_registry",
    "register_schedule": "optim.schedules",
    "register_task": "tasks.registry",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `--help` does not wait for JAX to load."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__

"""The trainer. `fit` trains an experiment, `load` reads a trained run.

import train
run = train.fit(experiment, "runs/mine")
run = train.load("runs/mine")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config.experiment_files import find_experiment
    from train.data.bitext import BitextDataConfig
    from train.data.conversations import ConversationDataConfig
    from train.data.data_config import TextDataConfig, TokenizerConfig
    from train.data.features import FeatureDataConfig
    from train.data.listops import ListOpsDataConfig
    from train.data.preferences import PreferenceDataConfig
    from train.data.text_labels import ClassificationDataConfig
    from train.data.token_labels import TokenLabelDataConfig
    from train.engines.lora import LoRAConfig
    from train.errors import UserError
    from train.experiment import Experiment
    from train.fitting import fit
    from train.optim.optimizer_registry import register_optimizer
    from train.optim.schedules import register_schedule
    from train.run import Run, load
    from train.tasks.classification import Classification, Tagging
    from train.tasks.feature_classification import FeatureClassification
    from train.tasks.instruction import InstructionTuning
    from train.tasks.language_modeling import LanguageModeling
    from train.tasks.masked_language_modeling import MaskedLanguageModeling
    from train.tasks.preference import PreferenceOptimization
    from train.tasks.registry import register_dataset, register_task
    from train.tasks.translation import Translation

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

__all__ = [
    "BitextDataConfig",
    "Classification",
    "ClassificationDataConfig",
    "ConversationDataConfig",
    "Experiment",
    "FeatureClassification",
    "FeatureDataConfig",
    "InstructionTuning",
    "LanguageModeling",
    "ListOpsDataConfig",
    "LoRAConfig",
    "MaskedLanguageModeling",
    "PreferenceDataConfig",
    "PreferenceOptimization",
    "Run",
    "Tagging",
    "TextDataConfig",
    "TokenLabelDataConfig",
    "TokenizerConfig",
    "Translation",
    "UserError",
    "find_experiment",
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


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

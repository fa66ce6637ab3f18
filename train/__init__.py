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
    from train.errors import UserError
    from train.experiment import Experiment
    from train.loop import fit
    from train.lora.lora_config import LoRAConfig
    from train.optim.optimizer_registry import register_optimizer
    from train.optim.schedules import register_schedule
    from train.run import Run, load
    from train.tasks.task_configs import (
        Classification,
        FeatureClassification,
        InstructionTuning,
        LanguageModeling,
        MaskedLanguageModeling,
        PreferenceOptimization,
        Tagging,
        Translation,
    )
    from train.tasks.task_registry import register_dataset, register_task

_MODULES = {
    "BitextDataConfig": "data.bitext",
    "Classification": "tasks.task_configs",
    "ClassificationDataConfig": "data.text_labels",
    "ConversationDataConfig": "data.conversations",
    "Experiment": "experiment",
    "FeatureClassification": "tasks.task_configs",
    "FeatureDataConfig": "data.features",
    "InstructionTuning": "tasks.task_configs",
    "LanguageModeling": "tasks.task_configs",
    "ListOpsDataConfig": "data.listops",
    "LoRAConfig": "lora.lora_config",
    "MaskedLanguageModeling": "tasks.task_configs",
    "PreferenceDataConfig": "data.preferences",
    "PreferenceOptimization": "tasks.task_configs",
    "Run": "run",
    "Tagging": "tasks.task_configs",
    "TextDataConfig": "data.data_config",
    "TokenLabelDataConfig": "data.token_labels",
    "TokenizerConfig": "data.data_config",
    "Translation": "tasks.task_configs",
    "UserError": "errors",
    "find_experiment": "config.experiment_files",
    "fit": "loop",
    "load": "run",
    "register_dataset": "tasks.task_registry",
    "register_optimizer": "optim.optimizer_registry",
    "register_schedule": "optim.schedules",
    "register_task": "tasks.task_registry",
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

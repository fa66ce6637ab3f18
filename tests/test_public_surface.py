"""The public surface: every name has a documentation."""

import inspect
from types import FunctionType, ModuleType

import pytest

import train
import transformer
from train.tasks.registry import TASKS

PUBLIC = [(module, name) for module in (transformer, train) for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_each_public_name_is_documented(module: ModuleType, name: str) -> None:
    result = getattr(module, name)
    assert inspect.getdoc(result)
    if isinstance(result, type):
        assert "__doc__" in vars(result)
        assert not str(result.__doc__).startswith(f"{name}("), "has dataclass's own docstring"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_methods_are_documented(module: ModuleType, name: str) -> None:
    result = getattr(module, name)
    members = vars(result) if isinstance(result, type) else {}
    kinds = (FunctionType, property, classmethod, staticmethod)
    for member, value in members.items():
        if not member.startswith("_") and isinstance(value, kinds):
            assert inspect.getdoc(getattr(result, member)), member


def test_every_task_and_dataset_is_public() -> None:
    module = train.LanguageModeling.__module__  # other tests register tasks of their own
    tasks = [entry.config for entry in TASKS.values() if entry.config.__module__ == module]
    datasets = [config for task in tasks for config in task.data_configs]
    assert {config.__name__ for config in (*tasks, *datasets)} <= set(train.__all__)

"""The public surface: what `dir` shows, and what `help` says about it."""

import dataclasses
import inspect
import pydoc
from types import FunctionType, ModuleType

import pytest

import train
import transformer
from train.tasks.task_registry import TASKS

PUBLIC = [(module, name) for module in (transformer, train) for name in module.__all__]
FLAX_FIELDS = {"parent", "name"}
"""Fields that Flax adds to every module."""


@pytest.mark.parametrize("module", [transformer, train])
def test_dir_shows_the_public_names(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    for name in dir(module):
        getattr(module, name)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_help_describes_each_public_name_and_field(module: ModuleType, name: str) -> None:
    result = getattr(module, name)
    if not isinstance(result, type):
        assert inspect.getdoc(result)
        return
    assert "__doc__" in vars(result)
    assert not str(result.__doc__).startswith(f"{name}("), "has the docstring that dataclass makes"
    fields = (
        [field.name for field in dataclasses.fields(result)]
        if (dataclasses.is_dataclass(result))
        else getattr(result, "_fields", ())
    )
    shown = pydoc.plain(pydoc.render_doc(result))
    for field in set(fields) - FLAX_FIELDS:
        assert f"|    {field}: " in shown, field


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

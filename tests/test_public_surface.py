"""The public surface: what `dir` shows, and what `help` says about it."""

import dataclasses
import inspect
import pydoc
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import train
import transformer
from train.tasks.task_registry import TASKS
from transformer.field_docs import field_docs

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


def test_documentation_comes_from_the_source() -> None:
    docs = field_docs(transformer.NormConfig)
    assert docs["epsilon"].strip()
    text = " ".join(str(transformer.NormConfig.__doc__).split())
    assert all(" ".join(f"{name}: {doc}".split()) in text for name, doc in docs.items())
    assert field_docs(transformer.MixerOutput)["y"] == "[B, T, D]"  # a comment
    assert "path" in field_docs(train.TextDataConfig)
    assert "max_length" in field_docs(train.ClassificationDataConfig)  # documented by a base class


def test_fields_of_a_class_without_source_are_omitted() -> None:
    actual = dataclasses.make_dataclass("Made", [("x", int)])
    assert field_docs(actual) == {}


def test_source_is_read_only_for_help() -> None:
    """Importing a public name neither loads JAX nor parses a file."""
    code = (
        "import sys; from transformer import TransformerConfig; from train import TextDataConfig\n"
        "import transformer.field_docs as docs\n"
        "assert docs.field_docs.cache_info().misses == 0\n"
        "assert 'jax' not in sys.modules\n"
        "assert 'num_layers: ' in TransformerConfig.__doc__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

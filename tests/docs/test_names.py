"""Every setting, file and heading that the documentation names exists."""

import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from bench.entries import entries
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import flatten_experiment
from train.data.data_config import SourceConfig
from train.data.question_answers import QuestionAnsweringDataConfig
from train.tasks.question_answering import QuestionAnswering

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
PARTS = (
    "model|data|task|optimizer|schedule|evaluation|checkpoint|sample|"
    "recovery|mesh|ema|early_stopping|tracking"
)
NOT_SETTINGS = {"recovery.json", "sample.py"}
"""Files, of this project and of nanoGPT, whose names look like settings."""


@cache
def settings() -> frozenset[str]:
    """Return the dotted names of all settings of the shipped configs, indices as `N`."""
    names = {
        re.sub(r"\.\d+\b", ".N", name)
        for config in list_experiments()
        for name in flatten_experiment(find_experiment(config))
    }
    # No shipped config has several data sources.
    names |= {f"data.sources.N.{field.name}" for field in dataclasses.fields(SourceConfig)}
    # And none answers questions.
    names |= {f"task.{field.name}" for field in dataclasses.fields(QuestionAnswering)}
    names |= {f"data.{field.name}" for field in dataclasses.fields(QuestionAnsweringDataConfig)}
    prefixes = {name.rsplit(".", depth)[0] for name in names for depth in range(1, 6)}
    return frozenset(names | prefixes)


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    flags = re.findall(rf"--((?:{PARTS.replace('_', '-')})(?:\.[\w-]+)+)", text)
    fields = re.findall(rf"`((?:{PARTS})(?:\.\w+)+)`", text)
    fields = [
        name for name in fields if not name.endswith(".weight")
    ]  # settings of Hugging Face models
    for name in [flag.replace("-", "_") for flag in flags] + fields:
        expected = re.sub(r"\.\d+\b", ".N", name).replace(".no_", ".")
        assert expected in settings() | NOT_SETTINGS, name


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    folders = "transformer|train|tests|bench|configs|cloud|colab"
    paths = re.findall(rf"\b((?:{folders})/[\w/]+\.\w+)", text)
    paths += re.findall(r"`(tests/[\w/]+)`", text)
    for path in paths:
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:bench|tests|docs)[\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
    names = {each.name for listed in entries().values() for each in listed}
    for name in re.findall(r"python\s+-m\s+bench\s+(\w+)", text):
        assert name in names | {"headline", "readme"}, name


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, "RESULTS.md", "CHANGELOG.md", "bench/README.md"])
def test_links_resolve(page: str) -> None:
    source = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", source.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        result = (source.parent / name) if name else source
        assert result.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", result.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), target

"""Imports run one way: configs -> train -> transformer."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_NOT = {
    "transformer": {"train", "configs", "tests", "bench"},
    "train": {"configs", "tests", "bench"},
    "configs": {"tests", "bench"},
}

# A config is found by its name: the one place where the trainer looks at what is above it.
ALLOWED = {("train/config/experiment_files.py", "configs")}


def imports(file: Path) -> Iterator[str]:
    """The top-level packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", MAY_NOT)
def test_packages_import_nothing_above_them(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    actual = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in imports(file)
        if name in MAY_NOT[package]
    }
    assert actual <= ALLOWED

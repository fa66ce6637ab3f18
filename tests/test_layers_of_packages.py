"""Imports run one way: configs -> train -> transformer, and in no circle inside them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.import_circles import find_circles

ROOT = Path(__file__).resolve().parents[1]

FORBIDDEN = {
    "transformer": {"train", "configs", "tests", "bench"},
    "train": {"configs", "tests", "bench"},
    "configs": {"tests", "bench"},
}

# Configs are found by name: the only place where the trainer refers to an upper layer.
ALLOWED = {("train/config/experiment_files.py", "configs")}


def imports(file: Path) -> Iterator[str]:
    """Return the top-level packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_do_not_import_upper_layers(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    actual = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in imports(file)
        if name in FORBIDDEN[package]
    }
    assert actual <= ALLOWED


def test_no_files_and_no_folders_import_each_other_in_a_circle(tmp_path: Path) -> None:
    assert not find_circles()
    for name, text in {
        "train/a/one.py": "from train.b.two import x",
        "train/b/two.py": "x = 1",
        "train/b/three.py": "def f():\n    from train.a import one",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_circles(tmp_path) == ["train.a -> train.b -> train.a"]

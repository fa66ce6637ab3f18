"""A small sample of `bench.drills.fuzz`: files of a run folder, and arguments."""

from pathlib import Path

import pytest

from bench.drills.fuzz import Target, fuzz
from bench.drills.fuzz import targets as all_targets

CASES = 25

RUN_FILES = (
    "config.json",
    "labels.json",
    "logbook.jsonl",
    "manifest",
    "metrics.jsonl",
    "recovery.json",
    "tokenizer.json",
)
DATASETS = (
    "text",
    "text, gzip",
    "JSON lines",
    "TSV",
    "labels first",
    "CoNLL-U",
    "columns",
    "translations",
    "vocab.txt",
    "merges.txt",
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    actual = all_targets(tmp_path_factory.mktemp("scratch") / "checkpoints")
    return {target.name: target for target in actual}


@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_run_files(targets: dict[str, Target], name: str, tmp_path: Path) -> None:
    counts = fuzz(targets[name], tmp_path, CASES)
    assert counts["cases"] >= CASES
    assert counts["refused"] < counts["cases"]


@pytest.mark.full
@pytest.mark.parametrize("name", DATASETS)
def test_damaged_datasets(targets: dict[str, Target], name: str, tmp_path: Path) -> None:
    assert fuzz(targets[name], tmp_path, CASES)["cases"] >= CASES


@pytest.mark.full
def test_random_arguments(targets: dict[str, Target], tmp_path: Path) -> None:
    assert fuzz(targets["settings"], tmp_path, CASES)["refused"]


@pytest.mark.nightly
def test_random_models(targets: dict[str, Target], tmp_path: Path) -> None:
    counts = fuzz(targets["models"], tmp_path, CASES)
    assert 0 < counts["refused"] < counts["cases"]

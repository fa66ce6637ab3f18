"""Oversized downloads, impossible paths and damaged records raise one-line errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.data.formats import contents
from tests.train.object_store import bucket as bucket
from train.config.experiment_files import find_experiment
from train.data.bitext import BitextDataConfig, prepare_bitext
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.files import TextFile
from train.data.text_files import DocumentReader, read_lines
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.estimate.plan import load_prices
from train.experiment import Experiment
from train.files import cache_folder, expand_path, iter_lines, read_bytes
from train.reporter import Reporter
from train.rollback import RollbackRecord
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment, read_labels
from train.telemetry import event_log
from train.telemetry.goodput import ActivityTimer
from train.telemetry.metrics_log import MetricsLog


def text(path: Path) -> list[Any]:
    return contents(DocumentReader([TextFile(path.name, path)]).documents())


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda path: read_experiment(RunFolder(path.parent)),
    "labels.json": lambda path: read_labels(RunFolder(path.parent)),
    "recovery.json": RollbackRecord.read,
    "metrics.jsonl": event_log.read_records,
    "prices.toml": lambda path: load_prices(str(path)),
    "text.txt.gz": text,
    "words.conllu": lambda path: read_lines(TextFile(path.name, path)),
    "own.py": lambda path: find_experiment(str(path)),
    "tokenizer.json": Tokenizer.load,
    "vocab.txt": Tokenizer.load,
    "text.txt": text,
    "text.jsonl": text,
}
DOWNLOADED = ("tokenizer.json", "vocab.txt", "text.txt", "text.jsonl")


@pytest.mark.parametrize("name", READERS)
def test_folders_and_oversized_files_are_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(UserError, match=name):
        READERS[name](path)
    if name in DOWNLOADED:
        path.rmdir()
        with path.open("wb") as file:
            file.truncate(2**30)  # a sparse file, which uses no disk space
        with pytest.raises(UserError, match=name):
            READERS[name](path)


def test_files_are_read_to_the_limit(tmp_path: Path, bucket: str) -> None:
    for path in (expand_path(str(tmp_path / "a.json")), expand_path(f"{bucket}/a.json")):
        path.write_bytes(b"12345")
        assert read_bytes(path, 5) == b"12345"
        with pytest.raises(UserError, match=r"a.json: has 5 bytes or more, and at most 4 bytes"):
            read_bytes(path, 4)
        assert contents(DocumentReader([TextFile("a.txt", path)]).documents()) == [
            ("a.txt", "12345")
        ]


def test_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 2**24 + b"\n")
    with path.open("rb") as stream, pytest.raises(UserError, match=r"a.jsonl:2: .* than 16 MiB"):
        list(iter_lines(stream, path, 2**24))
    with path.open("rb") as stream:
        assert [len(line) for line in iter_lines(stream, path, 2**24 + 1)] == [3, 2**24 + 1]


def test_text_of_zero_bytes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("some words, in UTF-16, many of them".encode("utf-16-le") * 9)
    with pytest.raises(UserError, match=r"a.txt: is not text \(315 of its first 630 bytes are 0\)"):
        text(path)
    assert read_lines(TextFile("a.txt", path), "utf-16-le")
    path.write_bytes(b"a text\0\n")
    assert text(path) == [("a.txt", "a text\0\n")]


# Paths.


@pytest.mark.parametrize("path", ["~nouser/x.py", "a\0b"])
def test_impossible_paths_are_errors(path: str) -> None:
    readers: list[Callable[[str], object]] = [
        expand_path,
        cache_folder,
        RunFolder.create,
        RunFolder.open_existing,
        Tokenizer.load,
        load_prices,
        lambda path: prepare_text(TextDataConfig(path=path, tokenizer=TokenizerConfig("byte"))),
        *([find_experiment] if path.endswith(".py") else []),
    ]
    for read in readers:
        with pytest.raises(UsageError, match=r"home folder of ~nouser|contains a NUL"):
            read(path)


def test_names_that_are_too_long_are_errors(tmp_path: Path) -> None:
    path = str(tmp_path / ("a" * 300))
    with pytest.raises(UserError, match=r"config .*: File name too long; check the path"):
        find_experiment(f"{path}.py")
    with pytest.raises(UserError, match=r"File name too long; check the path"):
        prepare_bitext(BitextDataConfig(path=path, tokenizer=TokenizerConfig("byte")))


def test_cache_must_be_local(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"data.cache_dir gs://b/c: is remote"):
        cache_folder("gs://b/c")
    for name in ("XDG_CACHE_HOME", "TRANSFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(UserError, match=r"the home folder of ~ is not known"):
        cache_folder("")


# Records in a run's files.

ROLLBACK = {"first": 3, "step": 5, "checkpoint": 2, "cursor": 9, "rate": 0.5, "attempts": 1}


@pytest.mark.parametrize("name", ROLLBACK)
def test_invalid_rollbacks_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"rollbacks": [ROLLBACK], "cleared": True}))
    assert len(RollbackRecord.read(path).rollbacks) == 1
    value: object
    for value in (None, True, "1", -1, 2**31, 1e400, float("nan"), []):
        path.write_text(json.dumps({"rollbacks": [{**ROLLBACK, name: value}], "cleared": True}))
        with pytest.raises(UserError, match=rf"not a valid record of rollbacks \(Rollback.{name} "):
            RollbackRecord.read(path)


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"rollbacks": {}, "cleared": True},
        {"rollbacks": [[]], "cleared": True},
        {"rollbacks": [], "cleared": 1},
        {"rollbacks": []},
    ],
)
def test_invalid_record_of_rollbacks_is_refused(tmp_path: Path, record: object) -> None:
    (tmp_path / "recovery.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"recovery.json: is not a valid record"):
        RollbackRecord.read(tmp_path / "recovery.json")


def test_invalid_metric_step_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\n{"step": 1' + "0" * 400 + ', "split": "train"}')
    with MetricsLog(path, tmp_path / "tensorboard") as log:
        assert log.set_aside_after(5) == tmp_path / "metrics.jsonl.beyond-5"
    assert event_log.read_records(path) == [{"step": 1, "split": "train"}]


def test_samples_are_appended_to_existing_files(tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_bytes(b"\xff\n")
    reporter = Reporter(
        RunFolder(tmp_path),
        Experiment(),
        ActivityTimer(),
        initial_step=0,
        is_main_process=True,
        quiet=True,
    )
    reporter.log_sample(3, "words")
    assert (tmp_path / "samples.txt").read_bytes() == b"\xff\n--- step 3\nwords\n"

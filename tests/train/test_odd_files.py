"""Endless files, FIFOs, links and damaged fields raise one-line errors without blocking."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.object_store import bucket as bucket
from tests.train.support import command, tiny, write_config
from tests.train.support import light_compiler as light_compiler
from train.checkpoint import manifest
from train.checkpoint.discovery import absolute_path
from train.config.experiment_files import find_experiment
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.disk_cache import cache_folder
from train.data.files import TextFile, expand_path
from train.data.text_files import read_documents, read_lines
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.estimate.expected_time import load_prices
from train.recovery.rollback_record import RollbackRecord
from train.run import read_experiment
from train.run_folder.folder import RunFolder
from train.run_folder.regular_files import (
    MAX_LINE_BYTES,
    format_bytes,
    iter_lines,
    open_regular,
    read_bytes,
)
from train.tasks.vocabulary import read_labels
from train.telemetry import event_log
from train.telemetry.goodput import ActivityTimer, compute_goodput
from train.telemetry.goodput import read_time_records as read_times
from train.telemetry.metrics_log import MetricsLog, TensorBoardWriter
from train.telemetry.reporter import Reporter

Read = Callable[[Path], Any]


def text(path: Path) -> list[Any]:
    return list(read_documents([TextFile(path.name, path)]))


READERS: dict[str, Read] = {
    "config.json": lambda path: read_experiment(RunFolder(path.parent)),
    "labels.json": lambda path: read_labels(RunFolder(path.parent)),
    "recovery.json": RollbackRecord.read,
    "metrics.jsonl": event_log.read_records,
    "tokenizer.json": Tokenizer.load,
    "vocab.txt": Tokenizer.load,
    "prices.toml": lambda path: load_prices(str(path)),
    "text.txt": text,
    "text.jsonl": text,
    "text.txt.gz": text,
    "words.conllu": lambda path: read_lines(TextFile(path.name, path)),
    "own.py": lambda path: find_experiment(str(path)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "zeros", "folder", "loop"])
def test_special_files_are_rejected(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
    with pytest.raises(UserError) as refused:
        READERS[name](path)
    assert name in str(refused.value)


@pytest.mark.parametrize("name", [name for name in READERS if name != "text.txt.gz"])
def test_oversized_files_are_rejected_unread(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2**30)  # a sparse file, which uses no disk space
    with pytest.raises(UserError) as refused:
        READERS[name](path)
    assert name in str(refused.value)


def test_growing_file_is_read_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UserError, match=r"a: has 5 bytes or more, and at most 4 bytes are read"):
        read_bytes(path, 4)
    # Files of /proc report a size of 0.
    with pytest.raises(UserError, match=r"and at most 1 bytes are read"):
        read_bytes(Path("/proc/self/status"), 1)


def test_remote_files_are_bounded(bucket: str) -> None:
    path = expand_path(f"{bucket}/a.json")
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UserError, match=r"at most 4 bytes"):
        read_bytes(path, 4)
    assert list(read_documents([TextFile("a.txt", path)])) == [("a.txt", "12345")]


def test_log_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" + b"x" * MAX_LINE_BYTES + b"x\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:2: is a line of more than 16 MiB"):
        event_log.read_records(path)
    with open_regular(path) as stream:
        lines = iter_lines(stream, path, MAX_LINE_BYTES + 2)
        assert [len(line) for line in lines] == [3, MAX_LINE_BYTES + 2]
    assert [format_bytes(size) for size in (12, 2**24, 3 * 2**29)] == [
        "12 bytes",
        "16 MiB",
        "1.5 GiB",
    ]


def test_text_of_zero_bytes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("some words, in UTF-16, many of them".encode("utf-16-le") * 9)
    with pytest.raises(UserError, match=r"a.txt: is not text \(315 of its first 630 bytes are 0\)"):
        text(path)
    assert read_lines(TextFile("a.txt", path), "utf-16-le")
    path.write_bytes(b"a text\0\n")
    assert text(path) == [("a.txt", "a text\0\n")]


def test_checkpoint_with_fifo_is_damaged(tmp_path: Path) -> None:
    folder = absolute_path(tmp_path)
    (tmp_path / "a").write_bytes(b"")
    manifest.write_manifest(folder, manifest.hash_files(folder, ["a"]))
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    assert (
        manifest.find_manifest_problem(folder, "full")
        == "contains something that is not a regular file"
    )
    (tmp_path / manifest.MANIFEST_NAME).unlink()
    os.mkfifo(tmp_path / manifest.MANIFEST_NAME)
    assert manifest.find_manifest_problem(folder, "full") == "manifest.json is damaged"


# Links.


@pytest.mark.parametrize("leads_to", ["another's", "nothing", "/dev/full"])
def test_appending_does_not_follow_links(tmp_path: Path, leads_to: str) -> None:
    outside, path = tmp_path / leads_to, tmp_path / "time.jsonl"
    if leads_to == "another's":
        outside.write_text("mine\n")
    path.symlink_to(outside)
    with pytest.raises(UserError, match=r"time.jsonl: is a symbolic link, and a run writes"):
        event_log.append_records(path, [{"a": 1}])
    if leads_to == "another's":
        assert outside.read_text() == "mine\n"
    assert leads_to != "nothing" or not outside.exists()


def test_appending_to_fifo_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "time.jsonl")
    with pytest.raises(UserError, match=r"time.jsonl: is a FIFO, not a regular file"):
        event_log.append_records(tmp_path / "time.jsonl", [{"a": 1}])


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "samples.txt", "spikes"])
def test_run_folder_with_links_is_rejected(tmp_path: Path, name: str) -> None:
    """A run appends to and removes only files of its own."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"{name}: is a symbolic link"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert RunFolder.create(tmp_path / "link").path == tmp_path / "link"


def test_tensorboard_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"train: is a symbolic link"):
        TensorBoardWriter(tmp_path / "train", None)
    assert list((tmp_path / "elsewhere").iterdir()) == []


# Paths.


@pytest.mark.parametrize("path", ["~nouser/x", "~nouser/x.py", "a\0b"])
def test_impossible_paths_are_errors(tmp_path: Path, path: str) -> None:
    readers: list[Callable[[str], object]] = [
        expand_path,
        cache_folder,
        RunFolder.create,
        RunFolder.open_existing,
        Tokenizer.load,
        load_prices,
        lambda path: prepare_text(TextDataConfig(path=path, tokenizer=TokenizerConfig("byte"))),
    ]
    if path.endswith(".py"):
        readers.append(find_experiment)
    for read in readers:
        with pytest.raises(
            UsageError, match=r"the home folder of ~nouser is not known|contains a NUL"
        ):
            read(path)


def test_cache_must_be_local(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"data.cache_dir gs://b/c: is remote"):
        cache_folder("gs://b/c")
    for name in ("XDG_CACHE_HOME", "TRANSFORMER_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match=r"the home folder is not known; set HOME or XDG_CACHE"):
        cache_folder("")


# Records in a run's files.

ROLLBACK = {"first": 3, "step": 5, "checkpoint": 2, "cursor": 9, "rate": 0.5, "attempts": 1}


@pytest.mark.parametrize("name", ROLLBACK)
@pytest.mark.parametrize("value", [None, True, "1", -1, 2**31, 1e400, float("nan"), [], {}])
def test_invalid_rollback_record(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"rollbacks": [ROLLBACK], "cleared": True}))
    assert len(RollbackRecord.read(path).rollbacks) == 1
    path.write_text(json.dumps({"rollbacks": [{**ROLLBACK, name: value}], "cleared": True}))
    with pytest.raises(UserError, match=rf"is not a valid record of rollbacks \({name} is not"):
        RollbackRecord.read(path)


@pytest.mark.parametrize(
    "plain",
    [
        [],
        {"rollbacks": {}, "cleared": True},
        {"rollbacks": [[]], "cleared": True},
        {"rollbacks": [], "cleared": 1},
        {"rollbacks": []},
    ],
)
def test_invalid_metrics_record(tmp_path: Path, plain: object) -> None:
    (tmp_path / "recovery.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"recovery.json: is not a valid record of rollbacks"):
        RollbackRecord.read(tmp_path / "recovery.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 10**400, True, "1", None])
def test_invalid_time_record(tmp_path: Path, value: object) -> None:
    """A damaged line is ignored: it must not make a run fail at its end."""
    good = {"began": 1.0, "now": 9.0, "step": 2, "seconds": {"step": 4.0}}
    bad = [
        {**good, "began": value},
        {**good, "now": value},
        {**good, "step": value},
        {**good, "seconds": {"step": value}},
    ]
    path = tmp_path / "time.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (*bad, good)))
    assert read_times(path) == [good]
    assert compute_goodput(read_times(path)).seconds["step"] == 4.0


def test_invalid_metric_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\n{"step": 1' + "0" * 400 + ', "split": "train"}')
    with MetricsLog(RunFolder(tmp_path)) as log:
        assert log.set_aside_after(5) == tmp_path / "metrics.jsonl.beyond-5"
    assert event_log.read_records(path) == [{"step": 1, "split": "train"}]


def test_samples_are_appended_to_existing_files(tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_bytes(b"\xff\n")
    with (tmp_path / "samples.txt").open("ab") as file:
        file.truncate(2**30)  # it is neither read nor copied
    experiment = tiny(tmp_path)
    report = Reporter(
        RunFolder(tmp_path),
        experiment,
        ActivityTimer(),
        initial_step=0,
        is_main_process=True,
        quiet=True,
    )
    report.log_sample(3, "words")
    with (tmp_path / "samples.txt").open("rb") as file:
        assert file.read(2) == b"\xff\n"
        file.seek(2**30)
        assert file.read() == b"--- step 3\nwords\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "time.jsonl", "logbook.jsonl"])
def test_run_is_rejected_before_its_first_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    os.mkfifo(workdir / name)
    result = command(capsys, "fit", write_config(tmp_path), "--workdir", str(workdir), "--quiet")
    assert (result.status, result.output) == (1, "")
    assert f"{name}: is a FIFO, not a regular file" in result.error

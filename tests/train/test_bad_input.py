"""Errors of users and machines: one line that names a remedy, and nothing is lost."""

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from orbax.checkpoint import AsyncCheckpointer

import train
from tests.train.support import Outcome, assert_same_bits, command, losses, write_config
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.checkpoint.manager import CheckpointManager
from train.cli.main import main
from train.data.tokenizer import Tokenizer
from train.engines.engine import Engine
from train.errors import UserError
from train.reporter import Reporter

Capture = pytest.CaptureFixture[str]

STEPS = 6


class TrainedRun(NamedTuple):
    """Complete run without errors."""

    folder: Path
    config: str
    workdir: Path


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("bad")
    config = write_config(
        folder,
        num_layers="1",
        dropout="0.0",
        recovery="RecoveryConfig(window=0)",
        steps=str(STEPS),
        checkpoint="CheckpointConfig(every=2, keep_last=9)",
    )
    workdir = folder / "whole"
    with pytest.raises(SystemExit) as stop:
        main(["fit", config, "--workdir", str(workdir), "--quiet"])
    assert stop.value.code == 0
    return TrainedRun(folder, config, workdir)


@pytest.fixture
def copy(trained_run: TrainedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run.workdir, tmp_path / "copy"))


def assert_refused(found: Outcome, status: int, *words: str) -> None:
    """Assert one line on standard error, and nothing else."""
    assert (found.status, found.output) == (status, "")
    assert found.error.startswith("error: ")
    assert found.error.count("\n") == 1
    assert all(word in found.error for word in words), found.error


def fit(capsys: Capture, trained_run: TrainedRun, workdir: Path, *more: str) -> Outcome:
    return command(capsys, "fit", trained_run.config, "--workdir", str(workdir), "--quiet", *more)


def contents(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


# Texts, tokenizers and settings.


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--data.path /no/such/file", 1, "does not exist; give a file, a folder or a glob"),
        ("--data.path=", 2, "data.path: is empty; give a file"),
        ("--model.vocab-size 99", 1, "and the model 99; give"),
        ("--sample.every 3 --sample.prompt ä", 1, "sample.prompt: the text: has characters that"),
        ("--mesh.data 3", 2, "mesh data 3 x fsdp 1 x tensor 1: does not divide 8 devices; give"),
        ("--mesh.tensor 8 --mesh.data 1", 2, "axis heads of size 4: does not divide into 8 parts"),
        ("--batch-size 12", 2, "batch_size 12: does not divide among 8"),
        ("--data.sequence-length 17", 2, "the model's table of positions"),
        ("--model.d-model 18", 2, "num_heads 4: does not divide the width 18"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(
    capsys: Capture,
    trained_run: TrainedRun,
    tmp_path: Path,
    count_devices: Callable[[int], None],
    flags: str,
    status: int,
    words: str,
) -> None:
    count_devices(8)
    assert_refused(fit(capsys, trained_run, tmp_path / "run", *flags.split()), status, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the cat sat", "or lower data.sequence_length to 10"),
        ("", "is empty; give a path or a dataset that holds text"),
    ],
)
def test_texts_that_are_too_short(
    capsys: Capture, trained_run: TrainedRun, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "given.txt").write_text(text)
    actual = fit(capsys, trained_run, tmp_path / "run", "--data.path", str(tmp_path / "given.txt"))
    assert_refused(actual, 1, words)


def change_settings(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["experiment"])
    (folder / "config.json").write_text(json.dumps(config))


def test_text_that_is_gone(capsys: Capture, copy: Path) -> None:
    change_settings(copy, lambda experiment: experiment["data"].update(path="/no/such/text.txt"))
    actual = command(capsys, "evaluate", str(copy))
    assert_refused(actual, 1, "data.path /no/such/text.txt: does not exist; give")


def test_tokenizer_of_another_run(capsys: Capture, copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["é"] = len(tokenizer["model"]["vocab"])
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    actual = command(capsys, "sample", str(copy), "--prompt", "the")
    assert_refused(actual, 1, "tokenizer.json: has 2", "give the tokenizer that the model was")


# Runs and their folders.


def test_checkpoint_of_another_model(capsys: Capture, trained_run: TrainedRun, copy: Path) -> None:
    change_settings(copy, lambda experiment: experiment["model"].update(d_model=8))
    words = "config.json: model.d_model is 8, and checkpoint 6 was trained with 16; restore"
    assert_refused(command(capsys, "sample", str(copy)), 1, words)
    more = ("--model.d-model", "8", "--steps", "7")
    assert_refused(fit(capsys, trained_run, copy, *more), 1, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "has no experiment; restore the original file"),
        ('{"experiment": {"colour": "red"}}', "does not describe an experiment"),
    ],
)
def test_damaged_settings_change_nothing(
    capsys: Capture, trained_run: TrainedRun, copy: Path, text: str, words: str
) -> None:
    (copy / "config.json").write_text(text)
    before = contents(copy)
    for found in (command(capsys, "evaluate", str(copy)), fit(capsys, trained_run, copy)):
        assert_refused(found, 1, f"{copy / 'config.json'}: ", words)
    assert contents(copy) == before


def test_folders_without_a_run_or_a_checkpoint(capsys: Capture, tmp_path: Path, copy: Path) -> None:
    words = "holds no run (no config.json); give the folder"
    assert_refused(command(capsys, "sample", str(tmp_path)), 1, words)
    shutil.rmtree(copy / "checkpoints")
    words = "checkpoints: holds no checkpoint yet; train with fit first"
    assert_refused(command(capsys, "evaluate", str(copy)), 1, words)


@pytest.mark.full
def test_damaged_checkpoint(capsys: Capture, trained_run: TrainedRun, copy: Path) -> None:
    """The previous checkpoint is used; a damaged one that is requested by its step is refused."""
    for file in (copy / "checkpoints" / "6" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    result = command(capsys, "evaluate", str(copy), "--json")
    assert (result.status, json.loads(result.output)["step"]) == (0, 4)
    assert "checkpoint of step 6: state/" in result.error
    result = command(capsys, "evaluate", str(copy), "--step", "6")
    assert_refused(result, 1, "checkpoints/6: is damaged (state/", "ask for another step")
    result = fit(capsys, trained_run, copy)
    assert (result.status, result.error) == (0, "")
    assert losses(copy) == losses(trained_run.workdir)


def test_folders_that_cannot_be_written(
    capsys: Capture, trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for workdir, words in (
        (file, "is a file; give a folder"),
        (file / "below", "cannot be written (Not a directory)"),
        (tmp_path, "contains other files (file) and no run; give a new or an empty folder"),
    ):
        assert_refused(fit(capsys, trained_run, workdir), 1, words)
    assert file.read_text() == "mine"
    cache = ("--data.cache-dir", str(file / "cache"))
    actual = fit(capsys, trained_run, tmp_path / "run", *cache)
    assert_refused(actual, 1, "the data cache ", "Not a directory; make room there, or set data.ca")

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # Simulated, since the superuser may write everywhere. The lock is what a run writes first.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    actual = fit(capsys, trained_run, tmp_path / "run")
    assert_refused(actual, 1, "run: cannot be written (Permission denied)", "permissions, or give")


# Full disks and out of memory.


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Limit the file size of this process, which imitates a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_requeued_run_that_lost_its_checkpoints(
    capsys: Capture, trained_run: TrainedRun, copy: Path
) -> None:
    """A scheduler repeats the command: it fails until somebody decides, with or without a log."""
    for step in (2, 4, 6):
        (copy / "checkpoints" / str(step) / "manifest/metadata").unlink()
    (copy / "logbook.jsonl").unlink()
    before = contents(copy)
    for _ in range(2):
        words = ("none is intact (step 6: has no manifest; step 4", "with --from-scratch to begin")
        assert_refused(fit(capsys, trained_run, copy), 1, *words)
    assert contents(copy) == before
    for _ in range(2):
        assert fit(capsys, trained_run, copy, "--from-scratch").status == 0
    assert losses(copy) == losses(trained_run.workdir)


@pytest.mark.full
def test_full_disk_at_a_checkpoint(
    capsys: Capture, trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier checkpoints are valid, and the run resumes from them once there is room."""
    workdir = tmp_path / "run"
    save = AsyncCheckpointer.save

    def on_a_full_disk(self: AsyncCheckpointer, folder: Any, **rest: Any) -> None:
        if folder.name == "4":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, folder, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncCheckpointer, "save", on_a_full_disk)
        result = fit(capsys, trained_run, workdir)
    assert_refused(result, 1, "checkpoints/4: could not be written (No space left on device)")
    with CheckpointManager(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]
    assert sorted(losses(workdir)) == [1, 2, 3, 4]
    assert (workdir / "loss.png").exists()
    result = fit(capsys, trained_run, workdir)
    assert (result.status, result.error) == (0, "")
    assert losses(workdir) == losses(trained_run.workdir)
    ends = [train.load(str(each)).params for each in (workdir, trained_run.workdir)]
    assert_same_bits(*ends)


def test_full_disk_at_a_log_line(capsys: Capture, trained_run: TrainedRun, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    size = 2**22
    (workdir / "owner.lock").touch()  # of a run
    (workdir / "logbook.jsonl").write_text("\n" * size)
    with no_file_beyond(size):
        actual = fit(capsys, trained_run, workdir)
    assert_refused(actual, 1, "logbook.jsonl: cannot be written (File too large)")


def test_full_disk_at_a_resume(capsys: Capture, trained_run: TrainedRun, copy: Path) -> None:
    """Its settings and its tokenizer are unchanged."""
    before = contents(copy)
    with no_file_beyond(100):
        actual = fit(capsys, trained_run, copy, "--steps", "8")
    assert_refused(actual, 1, "cannot be written (File too large); make room there")
    assert contents(copy) == before
    assert Tokenizer.load(copy / "tokenizer.json").vocab_size > 10


@pytest.mark.full
def test_oom_during_training(
    capsys: Capture, trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier checkpoints are valid, and the run resumes from them."""
    workdir, step = tmp_path / "run", Engine.step

    def exhausted(self: Engine, state: Any, batch: Any) -> Any:
        if int(state.step) == 4:
            message = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."
            raise jax.errors.JaxRuntimeError(message)
        return step(self, state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", exhausted)
        actual = fit(capsys, trained_run, workdir)
    assert_refused(actual, 1, "memory: ran out asking for 123 bytes; raise grad_accum_steps")
    with CheckpointManager(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
    assert fit(capsys, trained_run, workdir).status == 0
    assert losses(workdir) == losses(trained_run.workdir)


def test_oom_at_evaluation(
    capsys: Capture, trained_run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(self: Engine, params: Any, batch: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.")

    monkeypatch.setattr(Engine, "evaluate", exhausted)
    actual = command(capsys, "evaluate", str(trained_run.workdir))
    assert_refused(actual, 1, "memory: ran out asking for 5 bytes; use devices with more memory")


@pytest.mark.full
def test_reporter_error_does_not_hide_the_first_error(
    trained_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report the full disk: a failed save matters more than a missing plot."""

    def fail(*_: Any) -> None:
        raise UserError("this stopped it")

    def also_fail(*_: Any) -> None:
        raise UserError("loss.png: cannot be written")

    monkeypatch.setattr(Reporter, "log_training", fail)
    monkeypatch.setattr("train.telemetry.loss_plot.plot_losses", also_fail)
    experiment = train.load(str(trained_run.workdir)).experiment
    with pytest.raises(UserError, match="this stopped it"):
        train.fit(experiment, str(tmp_path / "run"), quiet=True)

import errno
import os
import pathlib

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.run_folder.folder import RunFolder
from train.run_folder.writing import write_atomically


def test_a_new_folder_is_made_with_its_parents(tmp_path: pathlib.Path) -> None:
    folder = RunFolder.create(str(tmp_path / "runs" / "first"))
    assert folder.path == tmp_path / "runs" / "first"
    assert list(folder.path.iterdir()) == []


def test_everything_has_the_name_of_the_contract(tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path)
    paths = [
        folder.config_text,
        folder.config_json,
        folder.metrics,
        folder.checkpoints,
        folder.event_log,
        folder.loss_plot,
        folder.tokenizer,
        folder.tensorboard,
        folder.samples,
    ]
    names = "config.txt config.json metrics.jsonl checkpoints logbook.jsonl loss.png"
    names += " tokenizer.json tensorboard samples.txt"
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == names.split()


def test_a_run_goes_on_in_its_folder(tmp_path: pathlib.Path) -> None:
    write_atomically(tmp_path / "config.json", "{}")
    write_atomically(tmp_path / "notes of mine.txt", "warm up longer")
    assert RunFolder.create(str(tmp_path)) == RunFolder.open_existing(str(tmp_path))


def test_a_run_that_was_killed_before_its_config_was_written_can_begin_again(
    tmp_path: pathlib.Path,
) -> None:
    write_atomically(tmp_path / "tokenizer.json", "{}")
    write_atomically(tmp_path / ".DS_Store", b"")
    assert RunFolder.create(str(tmp_path)).path == tmp_path


def test_a_folder_of_other_things_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(
        UserError, match=r"contains other files \(configs, thesis\.tex\) and no run"
    ):
        RunFolder.create(str(tmp_path))


def test_a_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for opened in RunFolder.create, RunFolder.open_existing:
        with pytest.raises(UserError, match=r"file: is a file; give a folder"):
            opened(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/run: cannot be written \(Not a directory\); make"):
        RunFolder.create(str(tmp_path / "file" / "run"))


def test_a_folder_that_can_only_be_read_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: pathlib.Path, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "write_bytes", refuse)  # root may write wherever it is asked
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\); make room"):
        RunFolder.create(str(tmp_path))


def test_no_run_is_found_where_there_is_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: does not exist; give the --workdir"):
        RunFolder.open_existing(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"holds no run \(no config\.json\); give the --workdir"):
        RunFolder.open_existing(str(tmp_path))


def test_a_path_whose_file_system_is_not_installed_is_refused() -> None:
    with pytest.raises(UserError, match=r"^workdir gs://bucket/run: .*gcsfs"):
        RunFolder.create("gs://bucket/run")


def test_a_run_can_be_remote(bucket: str) -> None:
    folder = RunFolder.create(f"{bucket}/runs/first")
    write_atomically(folder.config_json, '{"a": 1}')
    assert RunFolder.open_existing(f"{bucket}/runs/first").config_json.read_text() == '{"a": 1}'


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "what?", "a\\b", "open["])
def test_a_path_that_checkpoints_cannot_be_stored_under_is_refused(
    name: str, tmp_path: pathlib.Path
) -> None:
    """Orbax and TensorStore would write files that they do not find again."""
    for use in (RunFolder.create, RunFolder.open_existing):
        with pytest.raises(UserError, match=r"has . (and . )?in its path, where checkp"):
            use(tmp_path / name)
    assert not list(tmp_path.iterdir())

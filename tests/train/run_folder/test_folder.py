import pathlib

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.run_folder.folder import RunFolder
from train.runtime.writing import write_atomically


def test_file_names_match_the_contract(tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path)
    expected = {
        "config.txt": folder.config_text,
        "config.json": folder.config_json,
        "metrics.jsonl": folder.metrics,
        "checkpoints": folder.checkpoints,
        "logbook.jsonl": folder.event_log,
        "loss.png": folder.loss_plot,
        "tokenizer.json": folder.tokenizer,
        "tensorboard": folder.tensorboard,
        "samples.txt": folder.samples,
    }
    assert {name: tmp_path / name for name in expected} == expected


def test_existing_run_folder_is_accepted(tmp_path: pathlib.Path) -> None:
    write_atomically(tmp_path / "config.json", "{}")
    write_atomically(tmp_path / "notes of mine.txt", "warm up longer")
    assert RunFolder.create(str(tmp_path)) == RunFolder.open_existing(str(tmp_path))


def test_run_killed_before_writing_its_config_can_restart(
    tmp_path: pathlib.Path,
) -> None:
    write_atomically(tmp_path / "tokenizer.json", "{}")
    write_atomically(tmp_path / "owner.lock", b"")
    assert RunFolder.create(str(tmp_path)).path == tmp_path


def test_folder_with_other_files_raises(tmp_path: pathlib.Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"other files \(configs, thesis\.tex\) and no run"):
        RunFolder.create(str(tmp_path))


def test_file_instead_of_folder_raises(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for opened in RunFolder.create, RunFolder.open_existing:
        with pytest.raises(UserError, match=r"file: is a file; give a folder"):
            opened(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/run: cannot be written \(Not a directory\); make"):
        RunFolder.create(str(tmp_path / "file" / "run"))


def test_missing_run_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="nowhere: does not exist"):
        RunFolder.open_existing(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no run"):
        RunFolder.open_existing(str(tmp_path))


def test_uninstalled_file_system_raises() -> None:
    with pytest.raises(UserError, match="gcsfs"):
        RunFolder.create("gs://bucket/run")


def test_remote_run_folder(bucket: str) -> None:
    folder = RunFolder.create(f"{bucket}/runs/first")
    write_atomically(folder.config_json, '{"a": 1}')
    assert RunFolder.open_existing(f"{bucket}/runs/first").config_json.read_text() == '{"a": 1}'


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "what?", "a\\b", "open["])
def test_unsupported_path_for_checkpoints_raises(name: str, tmp_path: pathlib.Path) -> None:
    """Orbax and TensorStore would write files there that they do not find again."""
    for use in (RunFolder.create, RunFolder.open_existing):
        with pytest.raises(UserError, match=r"has . (and . )?in its path, where checkp"):
            use(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_failed_start_leaves_no_empty_folder(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "runs" / "new"
    with pytest.raises(UserError, match="no data"), RunFolder.created(path):
        raise UserError("no data")
    assert not path.exists()
    with RunFolder.created(path) as folder:
        folder.config_json.write_text("{}")
    with pytest.raises(UserError, match="later"), RunFolder.created(path):
        raise UserError("later")
    assert folder.config_json.exists()  # nothing written is lost
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(UserError, match="no data"), RunFolder.created(mine):
        raise UserError("no data")
    assert mine.exists()

import os
import pathlib

import pytest
from etils import epath

from train.data import files
from train.data.files import find_files
from train.errors import UsageError, UserError


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("b.txt", "a/c.txt", "a/d.md", "a/.hidden.txt", ".git/e.txt"):
        file = tmp_path / "corpus" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "corpus"


def names(path: object) -> list[str]:
    return [file.name for file in find_files(str(path), "data.path")]


def test_file_folder_and_glob(folder: pathlib.Path) -> None:
    assert names(folder / "b.txt") == ["b.txt"]
    assert names(folder) == ["a/c.txt", "a/d.md", "b.txt"]
    assert names(folder / "**" / "*.txt") == ["a/c.txt", "b.txt"]
    assert names(folder / "a" / "*") == ["c.txt", "d.md"]


def test_existing_names_with_wildcards_are_literal(folder: pathlib.Path) -> None:
    (folder / "x[1].txt").write_text("x")
    assert names(folder / "x[1].txt") == ["x[1].txt"]


def test_variables_and_home(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    assert names("$CORPUS/b.txt") == names("~/b.txt") == ["b.txt"]


def test_relative_path_falls_back_to_the_data_folder(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRANSFORMER_DATA", raising=False)
    with pytest.raises(UserError, match="set TRANSFORMER_DATA"):
        find_files("a/c.txt", "data.path")
    monkeypatch.setenv("TRANSFORMER_DATA", str(folder))
    assert names("a/c.txt") == ["c.txt"]
    assert names("a/*.md") == ["d.md"]
    with pytest.raises(UserError, match=f"neither here nor in {folder}"):
        find_files("nothing.txt", "data.path")
    pathlib.Path("b.txt").write_text("the one at hand goes first")
    assert find_files("b.txt", "data.path")[0].path == pathlib.Path("b.txt")


def test_missing_files_are_errors(folder: pathlib.Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UsageError, match=r"data\.path: is empty; give a file"):
        find_files("", "data.path")
    with pytest.raises(UserError, match=r"data\.test_path .*/nothing: does not exist; give"):
        find_files(str(folder / "nothing"), "data.test_path")
    with pytest.raises(UserError, match="holds no files"):
        find_files(str(folder / "empty"), "data.path")
    with pytest.raises(UserError, match="does not exist"):
        find_files(str(folder / "*.jsonl"), "data.path")
    with pytest.raises(UsageError, match="nowhere://x: no file system"):
        find_files("nowhere://x", "data.path")


def test_remote_paths_use_epath(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "expand_path", epath.Path)
    actual = find_files(str(folder), "data.path")
    assert [file.name for file in actual] == ["a/c.txt", "a/d.md", "b.txt"]
    assert isinstance(actual[0].path, epath.Path)
    assert actual[0].fingerprint()[:2] == (str(folder / "a" / "c.txt"), len("a/c.txt"))
    assert names(folder / "a" / "*.txt") == ["c.txt"]
    with pytest.raises(UserError, match=r"cannot have \*\*; give the folder itself"):
        names(folder / "**" / "*.txt")


def test_missing_file_system_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def locate(path: str) -> pathlib.Path:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(files, "expand_path", locate)
    with pytest.raises(UserError, match=r"data\.path gs://b/x: Please install gcsfs"):
        find_files("gs://b/x", "data.path")


def test_fingerprint_changes_with_the_file(folder: pathlib.Path) -> None:
    (file,) = find_files(str(folder / "b.txt"), "data.path")
    before = file.fingerprint()
    assert file.fingerprint() == before
    os.utime(folder / "b.txt", ns=(1, 1))
    touched = file.fingerprint()
    (folder / "b.txt").write_text("longer than it was")
    os.utime(folder / "b.txt", ns=(1, 1))
    assert len({before, touched, file.fingerprint()}) == 3
    (folder / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt: No such file"):
        file.fingerprint()

import os
import pathlib

import pytest
from etils import epath

from train.data import files
from train.data.files import Notes, find_files, find_splits
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
    with pytest.raises(UserError, match=r"neither here nor in \$TRANSFORMER_DATA"):
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
    with pytest.raises(UsageError, match=r"data\.path: is empty"):
        find_files("", "data.path")
    with pytest.raises(UserError, match=r"data\.test_path .*/nothing: does not exist"):
        find_files(str(folder / "nothing"), "data.test_path")
    for path, problem in (("empty", "holds no files"), ("*.jsonl", "does not exist")):
        with pytest.raises(UserError, match=problem):
            find_files(str(folder / path), "data.path")
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


def splits(folder: pathlib.Path, *paths: str) -> dict[str, list[str]]:
    """Return the names of a folder's files by split."""
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    found = find_splits(str(folder), "data.path", Notes())
    return {split: [file.name for file in files] for split, files in found.items()}


def test_data_folder_has_splits(tmp_path: pathlib.Path) -> None:
    assert splits(
        tmp_path, "README.md", "data/train-0.parquet", "data/validation-0.parquet", "x/TEST.JSON.gz"
    ) == {
        "train": ["data/train-0.parquet"],
        "validation": ["data/validation-0.parquet"],
        "test": ["x/TEST.JSON.gz"],
    }
    file = find_files(str(tmp_path), "data.validation_path", "validation")
    assert [each.name for each in file] == ["data/validation-0.parquet"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["train.txt", "valid.txt"], {"train": ["train.txt"], "validation": ["valid.txt"]}),
        (["dev/a.csv", "train/a.csv"], {"train": ["train/a.csv"], "validation": ["dev/a.csv"]}),
        # Names of files go before those of folders.
        (["training/train.csv", "training/dev.csv"],
         {"train": ["training/train.csv"], "validation": ["training/dev.csv"]}),
        (["LICENSE", "README.md", "reviews.csv"], {"train": ["reviews.csv"]}),
        # No data, texts with a README, and a program.
        (["a-training.md", "test.md"], {"train": ["a-training.md", "test.md"]}),
        (["README.md", "a.txt"], {"train": ["README.md", "a.txt"]}),
        (["a.py", "b.py", "tests/x.json", "train.csv"],
         {"train": ["a.py", "b.py", "tests/x.json", "train.csv"]}),
    ],
    ids=range(7),
)  # fmt: skip
def test_folders_with_and_without_splits(
    tmp_path: pathlib.Path, paths: list[str], expected: dict[str, list[str]]
) -> None:
    assert splits(tmp_path, *paths) == expected


def test_links_are_followed_once(tmp_path: pathlib.Path) -> None:
    """Followed each time, these links would make billions of paths."""
    folders = [tmp_path / f"folder{n}" for n in range(12)]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text("a")
        for other in folders:
            (folder / f"to_{other.name}").symlink_to(other)
        (folder / "above").symlink_to(tmp_path.parent)
    assert names(tmp_path) == [f"folder{n}/a.txt" for n in (0, 1, 10, 11, *range(2, 10))]


@pytest.mark.parametrize("last", ["9999999999", "999}{0..999}{0..999"])
def test_too_many_numbers_in_braces(last: str) -> None:
    with pytest.raises(UsageError, match="stands for more than 1,000,000 paths; give fewer"):
        find_files(f"a{{0..{last}}}.txt", "data.path")


def test_data_are_found_below_the_input_folder(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(files, "KAGGLE_INPUT", tmp_path)
    assert names("corpus/b.txt") == names("b.txt") == ["b.txt"]
    assert names("c.txt") == ["c.txt"]
    with pytest.raises(UserError, match="exists neither here nor in"):
        find_files("nothing.txt", "data.path")

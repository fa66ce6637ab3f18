import gzip
from pathlib import Path

import pytest

from train.data.files import TextFile, find_file
from train.data.text import line_location, read_lines
from train.errors import UserError


def written(folder: Path, content: bytes, name: str = "a.txt") -> TextFile:
    (folder / name).write_bytes(content)
    return TextFile(name, folder / name)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\n\r\nb \r\n", ["a", "", "b "]),
        (b"\xef\xbb\xbfa\n\n\n", ["a", "", ""]),
        ("a\u2028b\x0cc\x85\nd\n".encode(), ["a\u2028b\x0cc\x85", "d"]),
    ],
    ids=["plain", "no end", "windows", "byte order mark", "other separators"],
)
def test_lines(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    assert read_lines(written(tmp_path, content)) == lines
    assert read_lines(written(tmp_path, gzip.compress(content), "a.gz")) == lines


def test_another_encoding(tmp_path: Path) -> None:
    file = written(tmp_path, "a\nfür\nb\n".encode("latin-1"))
    assert read_lines(file, "latin-1") == ["a", "für", "b"]
    message = r"a\.txt:2: not utf-8 at byte 3 of the file \(0xfc\); convert it .*data\.encoding"
    with pytest.raises(UserError, match=message):
        read_lines(file)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"a\.txt: is empty; give a file"):
        read_lines(written(tmp_path, content))


def test_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.gz: damaged gzip"):
        read_lines(written(tmp_path, gzip.compress(b"abcdefgh")[:-9], "a.gz"))


def test_places_count_from_one(tmp_path: Path) -> None:
    file = TextFile("a", tmp_path / "a")
    assert line_location(file, 0) == f"{tmp_path / 'a'}:1"


def test_a_file_is_found_with_gz_after_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data", b"x", "one.en.gz")
    written(tmp_path / "data", b"x", "two.en")
    assert find_file(f"{tmp_path}/data/one.en", "data.path").name == "one.en.gz"
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path))
    assert find_file("data/two.en", "data.path").path == tmp_path / "data" / "two.en"
    assert find_file("data/one.en.gz", "data.path").name == "one.en.gz"


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMER_DATA", raising=False)
    with pytest.raises(UserError, match=r"data\.path x\.en: there is no such file.* give the path"):
        find_file("x.en", "data.path")
    with pytest.raises(UserError, match=r"data\.path .*: there is no such file"):
        find_file(str(tmp_path), "data.path")
    with pytest.raises(UserError, match=r"data\.test_path: is empty; give the path of a file"):
        find_file("", "data.test_path")

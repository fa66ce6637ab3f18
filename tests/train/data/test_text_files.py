import dataclasses
import gzip
import json
import pathlib
from pathlib import Path

import numpy as np
import pytest

from tests.train.data.formats import contents
from train.data import rows, text_files
from train.data.corpus import TextCorpus, prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.files import Notes, TextFile, find_file, find_files
from train.data.text_files import (
    Document,
    DocumentReader,
    read_lines,
    truncate_documents,
)
from train.errors import UserError


def read(path: pathlib.Path, field: str = "text") -> list[tuple[str, str]]:
    return contents(DocumentReader(find_files(str(path), "data.path"), field).documents())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_text_is_one_document_without_a_byte_order_mark(
    tmp_path: pathlib.Path, encoding: str
) -> None:
    text = "Zeile\r\n\n日本\x00 \n"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert read(tmp_path / "a.txt") == [("a.txt", text)]


def test_json_lines_are_one_document_a_line(tmp_path: pathlib.Path) -> None:
    lines = [{"text": "one\ntwo"}, {"text": "", "id": 5}, {"text": "é"}]
    content = "\n\n".join(map(json.dumps, lines)) + "\n"
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    expected = [("1", "one\ntwo"), ("5", "é")]
    assert read(tmp_path) == [
        (f"{name}:{line}", text) for name in ("a.jsonl", "b.jsonl.gz") for line, text in expected
    ]


def test_folder_of_mixed_files_without_empty_ones(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt.gz").write_bytes(gzip.compress(b"zipped", mtime=0))
    (tmp_path / "c.ndjson").write_text('{"body": "line"}')
    (tmp_path / "a.py").write_text("")
    assert read(tmp_path, "body") == [("c.ndjson:1", "line"), ("sub/b.txt.gz", "zipped")]


def test_tables_beside_text(tmp_path: pathlib.Path) -> None:
    """Of source code, every file is a text; a table of texts beside it is one still."""
    for name, content in (
        ("a.py", "print(1)"),
        ("b.json", '{\n "name": "b"\n}'),
        ("c.json", '{"name": "c"}'),
        ("d.csv", "n,m\n1,2"),
        ("e.csv", "n,text\n1,from a table"),
        ("f.json", '{"text": "x", "n": null}\n{"text": null}'),
    ):
        (tmp_path / name).write_text(content)
    notes = Notes()
    documents = DocumentReader(find_files(str(tmp_path), "data.path"), notes=notes).documents()
    assert contents(documents) == [
        ("a.py", "print(1)"),
        ("b.json", '{\n "name": "b"\n}'),
        ("c.json", '{"name": "c"}'),
        ("d.csv", "n,m\n1,2"),
        ("e.csv:2", "from a table"),
        ("f.json:1", "x"),
    ]
    assert notes.lines() == (
        f"{tmp_path}/b.json (and 1 more): is JSON without a field 'text', beside text: read so too",
        f"{tmp_path}/d.csv: is CSV without a field 'text', beside text: read so too",
        f"{tmp_path}/f.json: rows that are left out, as their 'text' is null: 1",
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xff", r"a\.txt:1: not UTF-8 at byte 3 of the file \(0xff\)"),
        ("a.txt", b"ab\xe6\x97", r"a\.txt:1: not UTF-8 at byte 2 of the file \(0xe6\)"),
        ("a.jsonl", b'{"text": "x"}\n\xe9', r"a\.jsonl:2: not UTF-8 at byte 14 of the file"),
        ("a.jsonl", b'{"text": "x"}\n{"text', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'\n["x"]', r"a\.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"body": "x", "n": 1}', r"has no field 'text' \(it has body, n\)"),
        ("a.jsonl", b'{"text": 5}', r"a\.jsonl:1: field 'text' is not a text"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: half a surrogate pair"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz: damaged gzip"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:-9], r"a\.txt\.gz: damaged gzip"),
    ],
    ids=range(10),
)
def test_error_names_the_damaged_file(
    tmp_path: pathlib.Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_byte_limit_keeps_characters_whole() -> None:
    documents = [Document("a", "abc"), Document("b", "éé"), Document("c", "x")]
    assert list(truncate_documents(documents, 0)) == documents
    assert contents(truncate_documents(documents, 6)) == [("a", "abc"), ("b", "é")]
    assert contents(truncate_documents(documents, 4)) == [("a", "abc")]
    assert contents(truncate_documents(documents, 3)) == [("a", "abc")]
    assert contents(truncate_documents(documents, 7)) == contents(documents[:2])
    assert list(truncate_documents(documents, 100)) == documents


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


def test_lines_in_another_encoding(tmp_path: Path) -> None:
    file = written(tmp_path, "a\nfür\nb\n".encode("latin-1"))
    assert read_lines(file, "latin-1") == ["a", "für", "b"]
    message = r"a\.txt:2: not UTF-8 at byte 3 of the file \(0xfc\); convert it .*data\.encoding"
    with pytest.raises(UserError, match=message):
        read_lines(file)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_empty_file_has_no_lines(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"a\.txt: is empty"):
        read_lines(written(tmp_path, content))


def test_file_is_found_with_gz_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data", b"x", "one.en.gz")
    written(tmp_path / "data", b"x", "two.en")
    assert find_file(f"{tmp_path}/data/one.en", "data.path").name == "one.en.gz"
    monkeypatch.setenv("TRANSFORMER_DATA", str(tmp_path))
    assert find_file("data/two.en", "data.path").path == tmp_path / "data" / "two.en"
    assert find_file("data/one.en.gz", "data.path").name == "one.en.gz"


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    for path, problem in (
        (f"{tmp_path}/x.en", "does not exist"),
        (str(tmp_path), "holds no files"),
        ("", "is empty"),
    ):
        with pytest.raises(UserError, match=rf"data\.path.*: {problem}"):
            find_file(path, "data.path")


@pytest.mark.parametrize("lines", [1, 2])
def test_one_line_of_json_is_a_document_or_a_row(tmp_path: pathlib.Path, lines: int) -> None:
    """A line longer than the buffer that the format is found by does not tell either."""
    long = "word " * 30_000
    text = json.dumps({"version": 1, "data": [{"text": "a"}, {"text": long}]})
    if lines == 2:
        text = "\n".join(json.dumps({"text": each}) for each in (long, "b"))
    (tmp_path / "a.json").write_text(text)
    texts = [each for _, each in read(tmp_path / "a.json")]
    assert texts == (["a", long] if lines == 1 else [long, "b"])


def test_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\N{ZERO WIDTH NO-BREAK SPACE}é日本\r\n🙂 two\nthree"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
    monkeypatch.setattr(rows, "_PIECE_BYTES", 3)
    monkeypatch.setattr(text_files, "_PIECES_IN_MEMORY", 2)
    [document] = DocumentReader(find_files(str(tmp_path / "a.txt"), "data.path")).documents()
    assert len(list(document.pieces())) > 5
    assert document.text == text
    assert (document.num_characters, document.num_bytes) == (len(text), len(text.encode()))
    assert document.part(2, 9).text == text[2:9]
    assert document.first_bytes(8).text == text.encode()[:8].decode(errors="ignore")
    (tmp_path / "a.txt").write_bytes(b"one\nt\xc3\xa9o\nth\xc3ree, and more text")
    [document] = DocumentReader(find_files(str(tmp_path / "a.txt"), "data.path")).documents()
    with pytest.raises(UserError, match=r"a\.txt:3: not UTF-8 at byte 11 of the file \(0xc3\)"):
        list(document.pieces())


@pytest.mark.parametrize("max_bytes", [0, 150_001])
def test_tokens_do_not_depend_on_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    random = np.random.default_rng(0)
    words = ["one", "deux", "três,", "日本。", "\n", "é", "x" * 9]
    (tmp_path / "a.txt").write_text(" ".join(random.choice(words, size=40_000)))

    def prepared(cache: str) -> TextCorpus:
        settings = TokenizerConfig("bpe", vocab_size=280)
        config = TextDataConfig(str(tmp_path / "a.txt"), tokenizer=settings, max_bytes=max_bytes)
        return prepare_text(dataclasses.replace(config, cache_dir=str(tmp_path / cache)))

    whole = prepared("whole")
    monkeypatch.setattr(rows, "_PIECE_BYTES", 7001)
    monkeypatch.setattr(text_files, "_PIECES_IN_MEMORY", 1)
    in_pieces = prepared("pieces")
    assert in_pieces.digest == whole.digest
    for name, stream in whole.streams.items():
        np.testing.assert_array_equal(in_pieces.streams[name].tokens, stream.tokens)
        assert len(stream.tokens) > 3000

"""Rows of files: the same for every format and compression, whatever the file is called."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.train.data.formats import (
    COMPRESSIONS,
    Write,
    arrow,
    cells,
    json_array,
    json_lines,
    parquet,
    zstd,
)
from train.data.files import TextFile
from train.data.rows import located_rows
from train.errors import UserError

ROWS = [
    {"text": "one\ntwo", "label": "a"},
    {"text": 'he said "so", twice', "label": "b"},
    {"text": "für\u2028alle; 日本", "label": "a"},
]


def read(folder: Path, name: str, content: bytes, **settings: Any) -> list[Any]:
    (folder / name).write_bytes(content)
    return [value for _, value in located_rows(TextFile(name, folder / name), **settings)]


@pytest.mark.parametrize("name", ["a.json", "a.JSONL", "a.txt", "a"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "marked"])
@pytest.mark.parametrize("write", [json_lines, json_array])
def test_json_by_its_content(tmp_path: Path, write: Write, mark: bytes, name: str) -> None:
    assert read(tmp_path, name, mark + write(ROWS)) == ROWS


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("write", [json_lines, json_array, cells])
def test_compressed_under_any_name(tmp_path: Path, write: Write, compression: str) -> None:
    name = "a.csv" if write is cells else "a"
    assert read(tmp_path, name, COMPRESSIONS[compression](write(ROWS))) == ROWS


@pytest.mark.parametrize("write", [parquet, arrow, partial(arrow, as_file=True)])
def test_tables_under_any_name(tmp_path: Path, write: Write) -> None:
    assert read(tmp_path, "a", write(ROWS)) == ROWS
    assert read(tmp_path, "b", gzip.compress(write(ROWS))) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("ending", "separator"), [(".csv", ","), (".csv", ";"), (".tsv", ","), (".tsv", "\t")]
)
def test_cells(tmp_path: Path, ending: str, separator: str, encoding: str) -> None:
    rows = [row | {"text": row["text"].replace(",", "").replace(";", "")} for row in ROWS]
    content = cells(rows, separator).decode().encode(encoding)
    assert read(tmp_path, f"a{ending}", content) == rows


def test_cells_without_quotes_or_names(tmp_path: Path) -> None:
    """A lone quote is a character: read with quotes, it would swallow the next rows."""
    content = b'"so\tx\n\nso\t"x" y\n"z"\ta\n'
    names = read(tmp_path, "a.tsv", content, text="cells", is_header=lambda cells: False)
    assert names == [{"0": '"so', "1": "x"}, {"0": "so", "1": '"x" y'}, {"0": '"z"', "1": "a"}]
    content = b'text\tn\n"Oh, he said.\t1\nNo."\t2\n'
    assert read(tmp_path, "a.tsv", content) == [
        {"text": '"Oh, he said.', "n": "1"},
        {"text": 'No."', "n": "2"},
    ]


def test_location_of_cells_is_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,n\n"one\ntwo",1\n\nthree,2\n')
    locations = [where for where, _ in located_rows(TextFile("a.csv", tmp_path / "a.csv"))]
    assert locations == [f"{tmp_path}/a.csv:2", f"{tmp_path}/a.csv:5"]


def test_only_array_of_an_object(tmp_path: Path) -> None:
    content = json.dumps({"version": [], "data": ROWS}, indent=1).encode()
    assert read(tmp_path, "a.json", content) == ROWS


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "dictionary"])
def test_strings_of_parquet(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    texts = pyarrow.array(["one", None, "für"])
    texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    written = io.BytesIO()
    write_table(pyarrow.table({"text": texts}), written)
    rows = read(tmp_path, "a.parquet", written.getvalue())
    assert rows == [{"text": "one"}, {"text": None}, {"text": "für"}]


def test_classes_have_their_names(tmp_path: Path) -> None:
    classes = {"names": ["O", "B"], "_type": "ClassLabel"}
    features = {"label": classes, "tags": {"feature": classes, "_type": "Sequence"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    rows = [{"label": 1, "tags": [0, 1]}, {"label": -1, "tags": [1]}]
    named = [{"label": "B", "tags": ["O", "B"]}, {"label": None, "tags": ["B"]}]
    assert read(tmp_path, "a.parquet", parquet(rows, metadata)) == named


LINES = b'{"text": "a line"}\n' * 2000


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.gz", lambda: gzip.compress(LINES)[:-20], "damaged gzip"),
        ("a.zst", lambda: zstd(LINES)[:-9], "damaged zstd"),
        ("a.zst", lambda: zstd(LINES)[:6] + b"\xff" * 50, "damaged zstd"),
        ("a.bz2", lambda: bz2.compress(LINES)[:-20], "damaged bzip2"),
        ("a.xz", lambda: lzma.compress(LINES)[:-20], "damaged xz"),
        ("a.jsonl.gz", lambda: b"<html>not found</html>", "damaged gzip .*first bytes"),
        ("a.parquet", lambda: parquet(ROWS)[:-30], "damaged table"),
        ("a.parquet", lambda: b"version https://git-lfs", "damaged Parquet .*first bytes"),
        ("a.json", lambda: json_array(ROWS)[:-9], "not JSON"),
        ("a.csv", lambda: b'text,n\n"one, two,1\n', r"a\.csv:2: unexpected end"),
        ("a.csv", lambda: b"text,n\none, two,1\n", r"a\.csv:2: has 3 columns, .* has 2"),
        ("a.zip", lambda: b"PK\x03\x04", "is a zip archive"),
        ("a.jsonl", lambda: b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl:1: not JSON .*digits"),
        ("a.json", lambda: b"[" * 100_000, "not JSON"),
    ],
    ids=range(14),
)
def test_damaged_files(tmp_path: Path, name: str, make: Callable[[], bytes], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, name, make())
    assert "\n" not in str(caught.value)
    assert f"{tmp_path}/{name}" in str(caught.value)

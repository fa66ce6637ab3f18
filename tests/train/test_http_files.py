"""Files at http addresses: ranges, broken connections, and server errors."""

import gzip
import json
import random
from pathlib import Path

import pytest

from tests.train.data.http_server import Server
from tests.train.data.http_server import server as server
from train import files as http_files
from train.data.files import find_files
from train.data.rows import RecordPosition
from train.data.text_files import DocumentReader
from train.errors import UserError
from train.files import HttpPath

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_files, "RETRY_SECONDS", 0.0)


def test_reading_on_takes_one_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with HttpPath(f"{server.url}/a.bin").open() as stream:
        assert stream.read() == CONTENT
        assert stream.read(1) == b""
    assert server.requests == [("GET", "")]


@pytest.mark.parametrize("ranges", [True, False])
def test_seeking_reads_from_there(server: Server, tmp_path: Path, ranges: bool) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    server.set(ranges=ranges)
    with HttpPath(f"{server.url}/a.bin").open() as stream:
        stream.seek(2_000_000)
        assert stream.read(7) == CONTENT[2_000_000:2_000_007]
        stream.seek(-5, 2)
        assert (stream.read(), stream.tell()) == (CONTENT[-5:], len(CONTENT))
        stream.seek(3)
        assert stream.read(4) == CONTENT[3:7]
    assert ("GET", "bytes=2000000-") in server.requests


def test_broken_connections_continue_where_they_broke(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    server.set(break_after=700_000)
    with HttpPath(f"{server.url}/a.bin").open() as stream:
        assert stream.read() == CONTENT
    asked = [each for _, each in server.requests]
    assert asked == ["", "bytes=700000-", "bytes=1400000-", "bytes=2100000-", "bytes=2800000-"]


def test_documents_of_an_address(server: Server, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(50))
    for number in (8, 9, 10):
        (tmp_path / f"part-{number:02}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    files = find_files(f"{server.url}/part-{{08..10}}.jsonl.gz", "data.path")
    assert [file.name for file in files] == [f"part-{n:02}.jsonl.gz" for n in (8, 9, 10)]
    documents = list(DocumentReader(files).documents())
    assert [each.text for each in documents] == 3 * [f"document {n}" for n in range(50)]
    (path, size, _) = files[0].fingerprint()
    assert (path, size) == (f"{server.url}/part-08.jsonl.gz", len(gzip.compress(lines.encode())))


def test_records_continue_at_their_byte(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_files, "BUFFER_BYTES", 64)
    lines = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(50))
    (tmp_path / "a.jsonl").write_text(lines)
    [file] = find_files(f"{server.url}/a.jsonl", "data.path")
    reader = DocumentReader([file])
    records = list(reader.records(file))
    position, _ = records[29]
    rest = reader.records(file, position)
    assert list(rest) == records[30:]
    assert server.requests[-1] == ("GET", f"bytes={position.offset}-")
    assert position == RecordPosition(sum(map(len, lines.splitlines(keepends=True)[:30])), 30)


def test_errors_name_the_address(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"/none\.jsonl: the server answers 404"):
        list(DocumentReader(find_files(f"{server.url}/none.jsonl", "data.path")).documents())
    assert len(server.requests) == 1  # not requested again
    with pytest.raises(UserError, match=r"\*\.jsonl: an http server has no list"):
        find_files(f"{server.url}/*.jsonl", "data.path")
    monkeypatch.setattr(http_files, "ATTEMPTS", 2)
    with pytest.raises(UserError, match="cannot be reached"):
        list(DocumentReader(find_files("http://127.0.0.1:9/a.jsonl", "data.path")).documents())
    (tmp_path / "b.jsonl").write_bytes(CONTENT)
    server.set(break_after=1, ranges=False)
    with pytest.raises(UserError, match=r"b\.jsonl: the connection broke at byte 1"):
        HttpPath(f"{server.url}/b.jsonl").open().read()


def test_numbers_in_braces_count_local_files(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"p{number}.txt").write_text("text")
    actual = find_files(f"{tmp_path}/p{{1..3}}.txt", "data.path")
    assert [file.name for file in actual] == ["p1.txt", "p2.txt", "p3.txt"]
    with pytest.raises(UserError, match="counts from 3 down to 1; swap them"):
        find_files(f"{tmp_path}/p{{3..1}}.txt", "data.path")

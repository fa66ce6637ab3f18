"""Rows as bytes of the formats and compressions that are read."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from train.data.text_files import Document

Write = Callable[[list[Any]], bytes]


def json_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def json_array(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def cells(rows: list[Any], separator: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0]], delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: list[Any], metadata: dict[str, str] | None = None) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    written = io.BytesIO()
    schema = pyarrow.Table.from_pylist(rows).replace_schema_metadata(metadata)
    write_table(schema, written, row_group_size=2)
    return written.getvalue()


def arrow(rows: list[Any], *, as_file: bool = False) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    make = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with make(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    compressed: bytes = sink.getvalue().to_pybytes()
    return compressed


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}


def contents(documents: Iterable[Document]) -> list[tuple[str, str]]:
    """Return the names and the texts of documents."""
    return [(each.name, each.text) for each in documents]

"""Rows of files: JSON lines and arrays, CSV, Parquet and Arrow tables, lines of plain text.

The first bytes decide on the compression and the format. The name of a file counts only where they
cannot tell: for CSV.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import IO, Any, Literal, NamedTuple

from train.data.files import Notes, TextFile, find_splits
from train.errors import UserError, as_user_error
from train.files import iter_lines, read_all, too_large_error
from train.runtime.host import host_memory_bytes

FORMATS_PAGE = "docs/tasks.md"
"""Page that shows the formats of every task, for error messages."""

Format = Literal["json lines", "json", "csv", "table", "text"]
"""Format of a file: rows of JSON, one document of JSON, CSV, Parquet or Arrow, plain text."""

TextForm = Literal["lines", "cells"]
"""What plain text is: a row a line, or separated cells."""

_BUFFER_BYTES = 2**17
_PIECE_BYTES = 2**20
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
_MAX_ZERO_BYTES = 64  # zero bytes that a buffer of text may have
_MAX_ROW_BYTES = 2**28  # limit of one line of JSON lines
_BATCH_ROWS = 1024

_COMPRESSIONS = {
    "gzip": (".gz", re.compile(rb"\x1f\x8b")),
    "zstd": (".zst", re.compile(rb"\x28\xb5\x2f\xfd")),
    "bzip2": (".bz2", re.compile(rb"BZh[1-9]\x31\x41\x59\x26\x53\x59")),
    "xz": (".xz", re.compile(rb"\xfd7zXZ\0")),
}
_TABLES = {
    "Parquet": ((".parquet", ".pq"), (b"PAR1",)),
    "Arrow": ((".arrow",), (b"ARROW1", b"\xff\xff\xff\xff")),
}
JSON_LINES_ENDINGS = (".jsonl", ".ndjson", ".jl", ".jsonlines")
_CSV_ENDINGS = (".csv", ".tsv", ".tab")
_OBJECT_START = re.compile(rb'\{\s*("[^"\n]*"\s*:|\})')
_ARRAY_START = re.compile(rb"\[\s*\{")


class RecordPosition(NamedTuple):
    """Place between two rows of a file."""

    offset: int = 0
    """Bytes before it in JSON lines, decompressed. Other formats: as `record`."""
    record: int = 0
    """Lines or rows before it."""


START = RecordPosition()


class Row(NamedTuple):
    """A row of a file."""

    end: RecordPosition
    """Position after it."""
    number: int
    """Number of its first line, or of the row in a format without lines, from 1."""
    location: str
    """Place for error messages: "path:number"."""
    value: Any
    """A dict, by the names of the fields; or a text."""


def read_rows(setting: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each row of the files of a path.

    Args:
      setting: Name of the setting that has the path, for error messages.
      path: A file, a folder or a glob.

    Raises:
      UserError: There are no files, or one is damaged.
    """
    yield from located_rows(*find_splits(path, setting, Notes())["train"])


def located_rows(
    *files: TextFile,
    text: TextForm = "lines",
    encoding: str = "utf-8",
    is_header: Callable[[Sequence[str]], bool] = lambda cells: True,
) -> Iterator[tuple[str, Any]]:
    """Yield the location ("path:number") and the value of each row of files that is not blank.

    Arguments and errors are those of `file_rows`; a file without rows is an error too.
    """
    for file in files:
        is_empty = True
        for row in file_rows(file, text=text, encoding=encoding, is_header=is_header):
            if not isinstance(row.value, str) or row.value.strip():
                is_empty = False
                yield row.location, row.value
        if is_empty:
            raise UserError(f"{file.path}: is empty; give a file that has something in it")


def file_rows(
    file: TextFile,
    *,
    start: RecordPosition = START,
    column: str = "",
    text: TextForm = "lines",
    encoding: str = "utf-8",
    is_header: Callable[[Sequence[str]], bool] = lambda cells: True,
) -> Iterator[Row]:
    """Yield the rows of a file.

    Args:
      file: A file of any format.
      start: Position to read from, as it was yielded before.
      column: The only column of a table that is read, if it is there; empty: all.
      text: What plain text is. Lines are also CSV without names for its columns.
      encoding: Encoding of text that is not UTF-8.
      is_header: Returns True if the first cells of CSV name the columns. Without names a row has
        the fields "0", "1" and so on.

    Raises:
      UserError: The file is unreadable, damaged, or not encoded as it should be.
    """
    with open_decompressed(file) as stream:
        kind = find_format(stream, file)
        if kind == "json lines":
            yield from _json_lines(stream, file, start)
            return
        if kind == "table":
            numbered = enumerate(_table_rows(stream, file, column, start.record), start.record + 1)
        else:
            content = read_text(stream, file, encoding)
            if kind == "csv" or (kind == "text" and text == "cells"):
                separator = _find_separator(content, file)
                cells = _csv_cells(content, file, separator)
                has_names = bool(cells) and is_header(cells[0].cells)
                if kind == "text" and not has_names and separator != "\t":
                    cells = _csv_cells(content, file, "\t")  # sentences have commas
                if text != "lines" or has_names:
                    rows = _csv_rows(cells, file, has_names)
                    yield from (row for row in rows if row.end.record > start.record)
                    return
            values = _json_document(content, file) if kind == "json" else split_lines(content)
            numbered = enumerate(values, 1)
        for number, value in numbered:
            if number > start.record:
                location = line_location(file, number - 1)
                yield Row(RecordPosition(number, number), number, location, value)


@contextlib.contextmanager
def open_decompressed(file: TextFile) -> Iterator[IO[bytes]]:
    """Open the bytes of a file, decompressed if it is. Text in UTF-16 with its mark becomes UTF-8.

    Raises:
      UserError: The file cannot be read, or it is damaged.
    """
    # The default buffer of 8 KiB is shorter than the first line of many files of JSON lines.
    buffer = (_BUFFER_BYTES,) if isinstance(file.path, pathlib.Path) else ()
    with as_user_error(str(file.path)), file.path.open("rb", *buffer) as stream:
        head = stream.read(10)
        stream.seek(0)
        compression = next((name for name, (_, x) in _COMPRESSIONS.items() if x.match(head)), "")
        for name, (ending, _) in _COMPRESSIONS.items():
            if file.name.lower().endswith(ending) and not compression:
                raise UserError(
                    f"{file.path}: damaged {name} (its first bytes are not those of {name}); fetch "
                    "it again, or rename it if it is not compressed"
                )
        if not compression:
            yield _as_utf8(stream, file)
            return
        openers: dict[str, Callable[[Any], Any]] = {
            "gzip": gzip.open,
            "bzip2": bz2.open,
            "xz": lzma.open,
            "zstd": lambda stream: import_pyarrow(file.path).CompressedInputStream(stream, "zstd"),
        }
        try:
            with openers[compression](stream) as unzipped:
                yield _as_utf8(io.BufferedReader(unzipped, _BUFFER_BYTES), file)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the file system
            raise UserError(
                f"{file.path}: damaged {compression} ({error}); fetch it again"
            ) from error


def _as_utf8(stream: IO[bytes], file: TextFile) -> IO[bytes]:
    """Return the stream, or one in UTF-8 if it begins with the byte order mark of UTF-16."""
    if not _peek(stream).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return stream
    return io.BytesIO(read_text(stream, file, "utf-16").encode())


def _peek(stream: IO[bytes]) -> bytes:
    """Return bytes that the stream gives next, at least one unless it is at its end."""
    if isinstance(stream, io.BufferedReader):
        return stream.peek(_BUFFER_BYTES)
    position = stream.tell()
    head = stream.read(_BUFFER_BYTES)
    stream.seek(position)
    return head


def find_format(stream: IO[bytes], file: TextFile) -> Format:
    """Return the format of an opened file.

    Raises:
      UserError: It is an archive, or not the table that its name says.
    """
    head = _peek(stream)
    name = plain_name(file)
    for kind, (endings, magic) in _TABLES.items():
        if head.startswith(magic):
            return "table"
        if name.endswith(endings):
            raise UserError(
                f"{file.path}: damaged {kind} (its first bytes are not those of {kind}); fetch it "
                "again"
            )
    if head.startswith(b"PK\x03\x04"):
        raise UserError(
            f"{file.path}: is a zip archive or a workbook; unpack it, or save the sheet as CSV"
        )
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    first, newline, rest = text.partition(b"\n")
    if text.startswith(b"{"):
        # All in one line may be one document: {"version": "1", "data": [...]}.
        if name.endswith(".json") and not rest.strip():
            return "json"
        if _is_json_object(first) or (not newline and _OBJECT_START.match(first)):
            return "json lines"
        if name.endswith(".json"):
            return "json"
    if _ARRAY_START.match(text) or (text.startswith(b"[") and name.endswith(".json")):
        return "json"
    if name.endswith(JSON_LINES_ENDINGS):
        return "json lines"
    return "csv" if name.endswith(_CSV_ENDINGS) else "text"


def plain_name(file: TextFile) -> str:
    """Return the name of a file in lower case, without the ending of its compression."""
    name = file.name.lower()
    for ending, _ in _COMPRESSIONS.values():
        name = name.removesuffix(ending)
    return name


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_text(stream: IO[bytes], file: TextFile, encoding: str = "utf-8") -> str:
    """Return the text of an opened file without a byte order mark.

    Args:
      stream: As `open_decompressed` gives it.
      file: The file, for error messages.
      encoding: Encoding of text that is not UTF-8.

    Raises:
      UserError: The memory has no room for it, it is plainly no text, or it is in neither encoding.
    """
    writes_zeros = "\0".encode(encoding) != b"\0"  # in ASCII, as UTF-16 does
    encoded = _read_bytes(stream, file, allow_zero_bytes=writes_zeros)
    if encoding != "utf-8" and not writes_zeros:
        # Few texts in another encoding happen to be UTF-8 too, and then they say the same.
        with contextlib.suppress(UnicodeDecodeError):
            return encoded.decode("utf-8-sig")
    try:
        return encoded.decode(encoding).removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start)
        raise _not_encoded(line_location(file, line), error, encoding, 0) from error


def read_pieces(file: TextFile) -> Generator[str]:
    """Yield the text of a file of UTF-8 in pieces, without a byte order mark.

    Raises:
      UserError: It cannot be read, it is plainly no text, or it is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_lines = num_bytes = 0
    with open_decompressed(file) as stream:
        while True:
            encoded = stream.read(_PIECE_BYTES)
            if not num_bytes:
                _check_zero_bytes(encoded[:_BUFFER_BYTES], file)
            try:
                piece = decoder.decode(encoded, final=not encoded)
            except UnicodeDecodeError as error:
                line = num_lines + error.object.count(b"\n", 0, error.start)
                offset = num_bytes + len(encoded) - len(error.object)
                raise _not_encoded(line_location(file, line), error, "utf-8", offset) from error
            yield piece if num_bytes else piece.removeprefix(_BYTE_ORDER_MARK)
            if not encoded:
                return
            num_lines += piece.count("\n")
            num_bytes += len(encoded)


def _read_bytes(stream: IO[bytes], file: TextFile, *, allow_zero_bytes: bool) -> bytes:
    # A quarter of the memory: its bytes, its characters and its tokens are in memory together.
    limit = (host_memory_bytes() or 2**36) // 4
    size = file.fingerprint()[1] if stream.seekable() else 0
    if size > limit:
        raise too_large_error(file.path, size, limit)
    start = stream.read(_BUFFER_BYTES)
    if not allow_zero_bytes:
        _check_zero_bytes(start, file)
    return start + read_all(stream, file.path, limit)


def _check_zero_bytes(start: bytes, file: TextFile) -> None:
    zeros = start.count(0)
    if zeros > _MAX_ZERO_BYTES and zeros > len(start) // 4:
        raise UserError(
            f"{file.path}: is not text ({zeros} of its first {len(start)} bytes are 0); leave "
            "the file out with a glob, or convert it (iconv -f utf-16 -t utf-8, say)"
        )


def _not_encoded(location: str, error: UnicodeDecodeError, encoding: str, offset: int) -> UserError:
    return UserError(
        f"{location}: not {encoding.upper()} at byte {offset + error.start} of the file "
        f"(0x{error.object[error.start]:02x}); convert it (iconv -f latin1 -t utf-8, say), set "
        "data.encoding where there is one, or leave the file out with a glob"
    )


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their ends. Line n is element n - 1."""
    # Not str.splitlines: it also cuts at characters that stand within sentences (U+2028).
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def line_location(file: TextFile, index: int) -> str:
    """Return the location of a line for error messages: "path:number"."""
    return f"{file.path}:{index + 1}"


def parse_json(text: str, location: str) -> Any:
    """Return a value of JSON. Raises UserError for what is not JSON, or no Unicode."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]
        raise UserError(
            f"{location}: not JSON ({reason}); correct it, or fetch the file again"
        ) from error
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{location}: half a surrogate pair; correct the \\u escape") from error
    return value


def _json_lines(stream: IO[bytes], file: TextFile, start: RecordPosition) -> Iterator[Row]:
    offset = start.offset
    _skip_bytes(stream, offset)
    lines = iter_lines(stream, file.path, _MAX_ROW_BYTES)
    for number, line in enumerate(lines, start=start.record + 1):
        location = line_location(file, number - 1)
        try:
            # The mark may stand at the start of any line: files are joined.
            text = line.decode().lstrip(_BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise _not_encoded(location, error, "utf-8", offset) from error
        offset += len(line)
        if text and not text.isspace():
            yield Row(RecordPosition(offset, number), number, location, parse_json(text, location))


def _skip_bytes(stream: IO[bytes], count: int) -> None:
    """Move forward in a stream, which may be compressed: then what is before is read again."""
    if count and stream.seekable():
        stream.seek(count)
        return
    while count and (skipped := stream.read(min(count, _BUFFER_BYTES))):
        count -= len(skipped)


def _json_document(text: str, file: TextFile) -> list[Any]:
    """Return the rows of an array, or of the only array in an object: {"data": [...]}.

    A first line that is longer than what the format was found by may have others behind it.
    """
    try:
        value = parse_json(text, str(file.path))
    except UserError:
        lines = [line for line in split_lines(text) if line.strip()]
        if not all(line.lstrip().startswith("{") for line in lines):
            raise
        return [parse_json(line, line_location(file, n)) for n, line in enumerate(lines)]
    if isinstance(value, dict):
        arrays = [each for each in value.values() if isinstance(each, list) and each]
        return arrays[0] if len(arrays) == 1 and isinstance(arrays[0][0], dict) else [value]
    return value if isinstance(value, list) else [value]


class _Cells(NamedTuple):
    """Cells of a row of CSV, which may take several lines, and the number of its first line."""

    line: int
    cells: list[str]


def _csv_rows(rows: list[_Cells], file: TextFile, has_names: bool) -> Iterator[Row]:
    """Yield the rows, by the names of the columns or by their numbers."""
    width = len(rows[0].cells) if rows else 0
    names = [name.strip() for name in rows[0].cells] if has_names else list(map(str, range(width)))
    for number, (line, cells) in enumerate(rows[has_names:], start=1):
        location = line_location(file, line - 1)
        if len(cells) != len(names):
            raise UserError(
                f"{location}: has {len(cells)} columns, and the first row "
                f"has {len(names)}; correct it, and quote cells that have the separator in them"
            )
        value = dict(zip(names, cells, strict=True))
        yield Row(RecordPosition(number, number), line, location, value)


def _find_separator(text: str, file: TextFile) -> str:
    first_line = text.partition("\n")[0]
    separators = ",;\t|" if plain_name(file).endswith(".csv") else "\t,;|"
    return next((each for each in separators if each in first_line), separators[0])


def _csv_cells(text: str, file: TextFile, separator: str) -> list[_Cells]:
    """Return the rows that are not empty.

    Many tables separated by tabs have no quotes, and " is a character like others: where reading
    them with quotes fails, or gives rows of several lengths or cells that hold the ends of rows,
    they are read without.
    """
    csv.field_size_limit(_MAX_ROW_BYTES)
    readings: list[list[_Cells]] = []
    problem: csv.Error | None = None
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        source = io.StringIO(text, newline="")
        reader = csv.reader(source, delimiter=separator, quoting=quoting, strict=True)
        rows: list[_Cells] = []
        line = 0
        try:
            for cells in reader:
                if any(map(str.strip, cells)):
                    rows.append(_Cells(line + 1, cells))
                line = reader.line_num
        except csv.Error as error:
            problem = problem or csv.Error(f"{line_location(file, line)}: {error}")
            continue
        # The quote of a sentence `"Oh, he said.` may end with another sentence, rows further on.
        has_joined_rows = separator == "\t" and any(
            "\t" in cell and "\n" in cell for each in rows for cell in each.cells
        )
        if _is_rectangle(rows) and not has_joined_rows:
            return rows
        readings.append(rows)
    if problem is not None and separator != "\t":
        raise UserError(f"{problem}; double each quote that stands in a quoted cell") from problem
    default = readings[-1 if separator == "\t" else 0]
    return next(filter(_is_rectangle, readings), default)


def _is_rectangle(rows: list[_Cells]) -> bool:
    return len({len(each.cells) for each in rows}) <= 1


def import_pyarrow(name: object) -> Any:
    """Return the module pyarrow. Raises UserError, about a file, if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            f"{name}: is read with pyarrow, which is not installed; "
            "pip install 'linen-transformer[parquet]'"
        ) from error
    return pyarrow


def _table_rows(stream: IO[bytes], file: TextFile, column: str, start: int) -> Iterator[Any]:
    """Yield the rows of Parquet or Arrow from row `start` on, a batch in memory at a time.

    Classes that the Hugging Face hub stores as numbers get their names; -1 stands for none.
    """
    pyarrow = import_pyarrow(file.path)
    if not stream.seekable():  # compressed; a table is read from its end
        stream = io.BytesIO(_read_bytes(stream, file, allow_zero_bytes=True))
    try:
        schema, batches = _open_table(pyarrow, stream, column, start)
        names = _class_names(schema.metadata)
        for batch in batches:
            batch.validate(full=True)  # without it, offsets of a damaged file lead out of memory
            for row in batch.to_pylist():
                yield {name: _named(value, names.get(name)) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError, UnicodeError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).partition("\n")[0] or "sizes beyond the memory"
        raise UserError(f"{file.path}: damaged table ({reason}); fetch it again") from error


def _open_table(
    pyarrow: Any, stream: IO[bytes], column: str, start: int
) -> tuple[Any, Iterator[Any]]:
    """Return the schema and the batches, from row `start` on."""
    if _peek(stream).startswith(b"PAR1"):
        from pyarrow import parquet

        file = parquet.ParquetFile(stream)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        groups = [group for group, end in enumerate(ends) if end > start]  # others are not read
        start -= ends[groups[0] - 1] if groups and groups[0] else 0
        columns = [column] if column in file.schema_arrow.names else None
        schema = file.schema_arrow
        batches = file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns)
    else:
        from pyarrow import ipc

        if _peek(stream).startswith(b"ARROW1"):
            table = ipc.open_file(stream)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            table = batches = ipc.open_stream(stream)
        schema = table.schema

    def rest() -> Iterator[Any]:
        remaining = start
        for batch in batches:
            yield batch.slice(remaining)
            remaining = max(0, remaining - len(batch))

    return schema, rest()


def _class_names(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return the names of the classes of each column that has some, as `datasets` writes them."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    names = {}
    for column, feature in features.items():
        inner = feature.get("feature", feature) if isinstance(feature, dict) else {}
        if isinstance(inner, dict) and isinstance(inner.get("names"), list):
            names[column] = inner["names"]
    return names


def _named(value: Any, names: list[str] | None) -> Any:
    if names is None:
        if isinstance(value, bytes):  # Spark writes strings so, and others write images
            with contextlib.suppress(UnicodeDecodeError):
                return value.decode()
        return value
    if isinstance(value, list):
        return [_named(each, names) for each in value]
    if isinstance(value, int):
        return names[value] if 0 <= value < len(names) else None
    return value


def field_of_row(row: Row, field: str, setting: str) -> str | None:
    """Return the text of a row; None if it is null.

    Args:
      row: The row.
      field: Name of the field that holds the text.
      setting: Name of the setting of field, for error messages.

    Raises:
      UserError: It has no text of this name.
    """
    value = row.value
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise UserError(
            f"{row.location}: not a JSON object; each line must be one, with the text in it "
            f"({FORMATS_PAGE}#running-text)"
        )
    if field not in value:
        has = ", ".join(value)[:200] or "none"
        raise UserError(
            f"{row.location}: has no field {field!r} (it has {has}); set {setting} "
            f"({FORMATS_PAGE}#running-text)"
        )
    text = value[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{row.location}: field {field!r} is not a text; set {setting} to another")
    return text

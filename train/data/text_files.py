"""Reading of files: documents of plain text, JSON lines and Parquet, and lines.

`python:library` names a corpus that every Python contains: its help topics and the source of its
standard library. It is real text and real code, and needs no network.
"""

import contextlib
import gzip
import importlib
import io
import json
import pathlib
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, cast

from train.data.bounded_files import iter_lines, read_all, too_large_error
from train.data.files import TextFile
from train.data.parquet_files import import_pyarrow, iter_parquet_texts
from train.errors import UserError, as_user_error
from train.runtime.local_hardware import host_memory_bytes

_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_COMPRESSED = (".gz", ".zst")

COMPRESSED_ENDINGS = (*_PARQUET, *_COMPRESSED)
"""Endings of files whose text is longer than their bytes."""


# Limit of decompressed bytes: this ratio of the file's size, or the minimum if that is more. gzip
# packs text about 20 to 1, and the zeros of a decompression bomb 1000 to 1.
_MAX_GZIP_RATIO, _MIN_GZIP_LIMIT = 200, 2**26


_BUFFER_BYTES = 2**17


_MAX_ZERO_BYTES = 64  # zero bytes that a buffer of text may have


_MAX_DOCUMENT_BYTES = 2**28  # limit of one line of a dataset in JSON lines, which is a document


class Document(NamedTuple):
    """A text, and a name that does not change when the corpus is moved or grows."""

    name: str
    text: str


def read_documents(
    files: Iterable[TextFile], *, text_field: str = "text", setting: str = "data.text_field"
) -> Iterator[Document]:
    """Yield the documents of the files, in order, except those without text.

    Args:
      files: Plain text (one document each) or JSON lines (one document a line).
      text_field: Field of a JSON line that holds the text.
      setting: Name of the setting of text_field, for error messages.

    Raises:
      UserError: A file is missing, unreadable, not UTF-8, damaged, or not what its name says.
    """
    for file in files:
        for _, document in read_records(file, text_field=text_field, setting=setting):
            if document.text:
                yield document


class RecordPosition(NamedTuple):
    """Place between two documents of a file."""

    offset: int = 0
    """Bytes before it, decompressed. Parquet: rows."""
    record: int = 0
    """Lines or rows before it."""


START = RecordPosition()


def truncate_documents(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Yield the first ``max_bytes`` UTF-8 bytes of the documents, in whole characters; 0: all."""
    remaining = max_bytes
    for name, text in documents:
        if not max_bytes:
            yield Document(name, text)
            continue
        encoded = text.encode()
        if len(encoded) < remaining:
            remaining -= len(encoded)
            yield Document(name, text)
            continue
        if cut := encoded[:remaining].decode(errors="ignore"):
            yield Document(name, cut)
        return


def read_records(
    file: TextFile, *, text_field: str, setting: str, start: RecordPosition = START
) -> Iterator[tuple[RecordPosition, Document]]:
    """Yield the documents of one file, each with the position after it.

    Args:
      file: Plain text (one document), JSON lines or Parquet.
      text_field: Field or column that holds the text.
      setting: Name of the setting of text_field, for error messages.
      start: Position to read from, as it was yielded before.

    Raises:
      UserError: As `read_documents` does.
    """
    plain_name = file.name
    for ending in _COMPRESSED:
        plain_name = plain_name.removesuffix(ending)
    with open_decompressed(file) as stream:
        if plain_name.endswith(_JSON_LINES):
            yield from _json_lines(stream, file, text_field, setting, start)
        elif plain_name.endswith(_PARQUET):
            texts = iter_parquet_texts(stream, file.path, text_field, setting, start.record)
            for number, text in enumerate(texts, start=start.record + 1):
                yield RecordPosition(number, number), Document(f"{file.name}:{number}", text)
        elif start == START:
            encoded = read_text(stream, file)
            yield RecordPosition(1, 1), Document(file.name, _decode(encoded, str(file.path)))


@contextlib.contextmanager
def open_decompressed(file: TextFile) -> Iterator[IO[bytes]]:
    """Open the bytes of a file, decompressed if its name ends in .gz or .zst."""
    with as_user_error(str(file.path)), file.path.open("rb") as stream:
        if file.name.endswith(".zst"):
            pyarrow = import_pyarrow(file.path)
            try:
                with pyarrow.CompressedInputStream(stream, "zstd") as unzipped:
                    bounded = _BoundedBytes(unzipped, file, stream)
                    yield cast("IO[bytes]", io.BufferedReader(bounded, _BUFFER_BYTES))
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and "compressed" not in str(error):
                    raise  # of the file itself
                raise UserError(f"{file.path}: damaged zstd ({error}); fetch it again") from error
            return
        if not file.name.endswith(".gz"):
            yield stream
            return
        try:
            with gzip.open(stream) as unzipped:
                bounded = _BoundedBytes(unzipped, file, stream)
                yield cast("IO[bytes]", io.BufferedReader(bounded, _BUFFER_BYTES))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{file.path}: damaged gzip ({error}); fetch it again") from error


def read_text(stream: IO[bytes], file: TextFile, *, allow_zero_bytes: bool = False) -> bytes:
    """Return all bytes of an opened file.

    Args:
      stream: As `open_decompressed` gives it.
      file: The file, for error messages.
      allow_zero_bytes: Accept zero bytes, which UTF-16 has and UTF-8 text does not.

    Raises:
      UserError: The memory has no room for it, or it is plainly no text.
    """
    # A quarter of the memory: its bytes, its characters and its tokens are in memory together.
    limit = (host_memory_bytes() or 2**36) // 4
    size = 0 if file.name.endswith(_COMPRESSED) else file.fingerprint()[1]
    if size > limit:
        raise too_large_error(file.path, size, limit)
    start = stream.read(_BUFFER_BYTES)
    zeros = start.count(0)
    if not allow_zero_bytes and zeros > _MAX_ZERO_BYTES and zeros > len(start) // 4:
        raise UserError(
            f"{file.path}: is not text ({zeros} of its first {len(start)} bytes are 0); leave "
            "the file out with a glob, or convert it (iconv -f utf-16 -t utf-8, say)"
        )
    return start + read_all(stream, file.path, limit)


class _BoundedBytes(io.RawIOBase):
    """Decompressed bytes of a file, up to the size that text can have.

    Without a bound, a decompression bomb would fill the memory.
    """

    def __init__(self, unzipped: Any, file: TextFile, compressed: IO[bytes]):
        self._unzipped, self._file, self._compressed = unzipped, file, compressed
        self._size = file.fingerprint()[1]  # 0: an HTTP server did not say
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._unzipped.readinto(buffer)
        self._bytes += count
        size = self._size or self._compressed.tell()
        if self._bytes > max(_MIN_GZIP_LIMIT, _MAX_GZIP_RATIO * size):
            raise UserError(
                f"{self._file.path}: unpacks to more than {_MAX_GZIP_RATIO} times its size, which "
                "no text does; leave it out, or unpack it yourself"
            )
        return count


def _decode(encoded: bytes, location: str, offset: int = 0) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location}: not UTF-8 at byte {offset + error.start} (0x{encoded[error.start]:02x}); "
            "convert it (iconv -t utf-8), or leave the file out with a glob"
        ) from error


def _json_lines(
    stream: IO[bytes], file: TextFile, field: str, setting: str, start: RecordPosition
) -> Iterator[tuple[RecordPosition, Document]]:
    offset = start.offset
    _skip_bytes(stream, offset)
    lines = iter_lines(stream, file.path, _MAX_DOCUMENT_BYTES)
    for number, line in enumerate(lines, start=start.record + 1):
        location = f"{file.path}:{number}"
        text = _decode(line, location, offset)
        offset += len(line)
        if text.strip():
            document = Document(
                f"{file.name}:{number}", field_of_line(text, field, location, setting)
            )
            yield RecordPosition(offset, number), document


def _skip_bytes(stream: IO[bytes], count: int) -> None:
    """Move forward in a stream, which may be compressed: then what is before is read again."""
    if count and stream.seekable():
        stream.seek(count)
        return
    while count and (skipped := stream.read(min(count, _BUFFER_BYTES))):
        count -= len(skipped)


def field_of_line(line: str, field: str, location: str, setting: str) -> str:
    """Return the text of one line of JSON.

    Args:
      line: The line.
      field: Name of the field that holds the text.
      location: Place of the line, for error messages.
      setting: Name of the setting of field, for error messages.

    Raises:
      UserError: The line is not JSON, or has no text of this name.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location}: not JSON ({error}); each line must be one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise UserError(
            f"{location}: not a JSON object; each line must be one, with the text in it"
        )
    if field not in record:
        has = ", ".join(record) or "none"
        raise UserError(f"{location}: has no field {field!r} (it has {has}); set {setting}")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{location}: field {field!r} is not a text; set {setting} to another")
    check_unicode(location, repr(field), text)
    return text


def check_unicode(location: str, name: str, text: str) -> None:
    """Raise UserError for half a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: half a surrogate pair in {name}; correct the \\u escape"
        ) from error


def read_lines(file: TextFile, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a file without their ends. Line n of the file is element n - 1.

    Raises:
      UserError: The file is unreadable, damaged, has another encoding, or only white space.
    """
    with open_decompressed(file) as stream:
        encoded = read_text(stream, file, allow_zero_bytes="\0".encode(encoding) != b"\0")
    text = _decode_line(encoded, encoding, file).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    # Not str.splitlines: it also cuts at characters that stand within sentences (U+2028).
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not any(map(str.strip, lines)):
        raise UserError(f"{file.path}: is empty; give a file that has something in it")
    return lines if lines[-1] else lines[:-1]


def line_location(file: TextFile, index: int) -> str:
    """Return the location of a line for error messages: "path:number"."""
    return f"{file.path}:{index + 1}"


def _decode_line(encoded: bytes, encoding: str, file: TextFile) -> str:
    try:
        return encoded.decode(encoding)
    except UnicodeDecodeError as error:
        line = encoded.count(b"\n", 0, error.start)
        raise UserError(
            f"{line_location(file, line)}: not {encoding} at byte {error.start} of the file "
            f"(0x{encoded[error.start]:02x}); convert it (iconv -f latin1 -t utf-8, say), or set "
            "data.encoding where there is one"
        ) from error


LIBRARY_PATH = "python:library"


# Not the library itself: other people's packages, tests, whole applications, tables that a
# program wrote, and the topics, which are read as texts and not as the source that quotes them.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"encodings", "pydoc_data"}
)


def library_files() -> tuple[TextFile, ...]:
    """Return the source files of the standard library, sorted by name."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = (
        TextFile(file.relative_to(root).as_posix(), file)
        for file in root.rglob("*.py")
        if file.is_file()
    )
    return tuple(sorted(filter(_belongs, files), key=lambda file: file.name))


def _belongs(file: TextFile) -> bool:
    *folders, name = file.name.split("/")
    generated = name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
    return not generated and not _LEFT_OUT.intersection(folders)


def library_documents(files: tuple[TextFile, ...]) -> Iterator[Document]:
    """Yield the help topics, then the files, except those that are not UTF-8.

    Raises:
      UserError: This Python was installed without them.
    """
    topics = _help_topics()
    if not topics and not files:
        raise UserError(
            f"{LIBRARY_PATH}: {sys.executable} was installed without the source of its library; "
            "give data.path a file or folder of text"
        )
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])
    for file in files:
        with as_user_error(str(file.path)):
            encoded = file.path.read_bytes()
        try:
            yield Document(file.name, encoded.decode())
        except UnicodeDecodeError:
            continue  # a few files keep the encoding of their time


def _help_topics() -> dict[str, str]:
    try:
        return importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return {}

"""Documents of files: plain text, or a text in each row of a table.

`python:library` names a corpus that every Python contains: its help topics and the source of its
standard library. It is real text and real code, and needs no network.
"""

import dataclasses
import functools
import importlib
import itertools
import os
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence

from train.data.files import Notes, TextFile, is_table
from train.data.rows import (
    JSON_LINES_ENDINGS,
    START,
    RecordPosition,
    field_of_row,
    file_rows,
    find_format,
    open_decompressed,
    plain_name,
    read_pieces,
    read_text,
    split_lines,
)
from train.errors import UserError, as_user_error

# Of a mebibyte each. A longer text is read again in each pass over it.
_PIECES_IN_MEMORY = 8


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and a name that does not change when the corpus is moved or grows."""

    name: str
    source: str | Callable[[], Iterator[str]]
    """The text, or a function that reads it in pieces, anew each time."""

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces: a long one is never held in full."""
        return iter((self.source,)) if isinstance(self.source, str) else self.source()

    @property
    def text(self) -> str:
        """The text in full."""
        return "".join(self.pieces())

    @property
    def is_empty(self) -> bool:
        """True for a document without text."""
        return not any(self.pieces())

    @property
    def num_characters(self) -> int:
        """Number of characters."""
        return sum(map(len, self.pieces()))

    @property
    def num_bytes(self) -> int:
        """Number of bytes in UTF-8."""
        return sum(len(piece.encode()) for piece in self.pieces())

    def part(self, start: int, stop: int) -> "Document":
        """Return the characters from `start` up to `stop` as a document of the same name."""

        def pieces() -> Iterator[str]:
            before = 0
            for piece in self.pieces():
                yield piece[max(0, start - before) : max(0, stop - before)]
                before += len(piece)

        return Document(self.name, pieces)

    def first_bytes(self, max_bytes: int) -> "Document":
        """Return the whole characters of the first bytes as a document of the same name."""

        def pieces() -> Iterator[str]:
            remaining = max_bytes
            for piece in self.pieces():
                encoded = piece.encode()
                yield encoded[: max(0, remaining)].decode(errors="ignore")
                remaining -= len(encoded)

        return Document(self.name, pieces)


def _read_document(file: TextFile) -> Document:
    """Return a file of plain text as one document. Only a short one is held in memory."""
    pieces = read_pieces(file)
    first = list(itertools.islice(pieces, _PIECES_IN_MEMORY))
    if next(pieces, None) is None:
        return Document(file.name, "".join(first))
    pieces.close()
    return Document(file.name, functools.partial(read_pieces, file))


class DocumentReader:
    """Documents of the files of one source.

    Plain text is one document. Of a table each row is one, the text of its field. Beside plain
    text, as in a folder of source code, JSON and CSV without that field are text like the rest.
    """

    def __init__(
        self,
        files: Sequence[TextFile],
        text_field: str = "text",
        setting: str = "data.text_field",
        notes: Notes | None = None,
    ):
        """Set up a reader; error messages name `setting`, and `notes` what files are taken for."""
        self.files = files
        self._field, self._setting = text_field, setting
        self._notes = Notes() if notes is None else notes
        self._beside_text = len(files) > 1 and not all(is_table(file.name) for file in files)

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order, except those without text.

        Raises:
          UserError: A file is missing, unreadable, not UTF-8, damaged, or not what its name says.
        """
        for file in self.files:
            for _, document in self.records(file):
                if not document.is_empty:
                    yield document

    def records(
        self, file: TextFile, start: RecordPosition = START
    ) -> Iterator[tuple[RecordPosition, Document]]:
        """Yield the documents of one file, each with the position after it.

        Raises:
          UserError: As `documents` does.
        """
        if self._is_text(file):
            if start == START:
                yield RecordPosition(1, 1), _read_document(file)
            return
        num_nulls = 0
        for row in file_rows(file, start=start, column=self._field):
            text_of_row = field_of_row(row, self._field, self._setting)
            num_nulls += text_of_row is None
            yield row.end, Document(f"{file.name}:{row.number}", text_of_row or "")
        if num_nulls:
            note = f"rows that are left out, as their {self._field!r} is null"
            self._notes.add(file.path, note, num_nulls)

    def _is_text(self, file: TextFile) -> bool:
        """Return True if a file is one document as it is; note what could be taken otherwise."""
        with open_decompressed(file) as stream:
            kind = find_format(stream, file)
        if kind == "text":
            return True
        is_named = plain_name(file).endswith(JSON_LINES_ENDINGS)
        if kind != "table" and not is_named and self._beside_text:
            try:
                first = next(file_rows(file), None)
                fields = first.value if first is not None and isinstance(first.value, dict) else ()
                has_field = self._field in fields
            except UserError:  # a comment in JSON, a template
                has_field = False
            if not has_field:
                name = kind.partition(" ")[0].upper()
                note = f"is {name} without a field {self._field!r}, beside text: read so too"
                self._notes.add(file.path, note)
                return True
        if kind in ("json", "json lines") and not is_table(file.name):
            self._notes.add(file.path, f"is read as {kind.replace('json', 'JSON')}, by its content")
        return False


def truncate_documents(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Yield the first ``max_bytes`` UTF-8 bytes of the documents, in whole characters; 0: all."""
    remaining = max_bytes
    for document in documents:
        size = document.num_bytes if max_bytes else -1
        if size >= remaining:
            if not (cut := document.first_bytes(remaining)).is_empty:
                yield cut
            return
        yield document
        remaining -= size if max_bytes else 0


def check_unicode(location: str, name: str, text: str) -> None:
    """Raise UserError for half a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location}: half a surrogate pair in {name}; correct the \\u escape"
        ) from error


def read_lines(file: TextFile, encoding: str = "utf-8") -> list[str]:
    """Return the lines of a file of text without their ends. Line n is element n - 1.

    Raises:
      UserError: The file is unreadable, damaged, has another encoding, or only white space.
    """
    with open_decompressed(file) as stream:
        lines = split_lines(read_text(stream, file, encoding))
    if not any(map(str.strip, lines)):
        raise UserError(f"{file.path}: is empty; give a file that has something in it")
    return lines


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
    files = []
    for folder, subfolders, names in os.walk(root):
        # Not entered at all: `site-packages` may have ten thousand files.
        subfolders[:] = [
            name for name in subfolders if name not in _LEFT_OUT and not name.startswith("config-")
        ]
        for name in names:
            file = pathlib.Path(folder, name)
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and file.is_file():
                files.append(TextFile(file.relative_to(root).as_posix(), file))
    return tuple(sorted(files, key=lambda file: file.name))


def library_documents(files: Sequence[TextFile]) -> Iterator[Document]:
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

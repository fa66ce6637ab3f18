"""What one path setting stands for: documents in a fixed order, readable as often as needed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from train.data.files import TextFile, find_files
from train.data.library import LIBRARY, library_documents, library_files
from train.data.text import Document, limit, read_documents
from train.errors import UserError


@dataclasses.dataclass(frozen=True)
class Source:
    """The documents that one setting names. Nothing is kept in memory: each pass reads anew."""

    setting: str
    path: str
    files: tuple[TextFile, ...]
    field: str
    limit_bytes: int

    @classmethod
    def find(cls, setting: str, path: str, *, field: str = "text", limit_bytes: int = 0) -> Source:
        """Finds the files that ``path``, the value of ``setting``, means (UserError: none)."""
        files = library_files() if path == LIBRARY else find_files(path, setting)
        return cls(setting, path, files, field, limit_bytes)

    def documents(self) -> Iterator[Document]:
        """The documents, never empty ones (UserError: there is no text at all)."""
        if self.path == LIBRARY:
            documents = library_documents(self.files)
        else:
            documents = read_documents(self.files, field=self.field)
        nothing = True
        for document in limit(documents, self.limit_bytes):
            nothing = False
            yield document
        if nothing:
            raise UserError(f"{self.setting} {self.path}: is empty; give a path that holds text")

    def fingerprint(self) -> list[object]:
        """What tells whether the text may have changed, as JSON: files, sizes and times."""
        version = [*sys.version_info] if self.path == LIBRARY else []
        files = [file.fingerprint() for file in self.files]
        return [version, self.field, self.limit_bytes, files]

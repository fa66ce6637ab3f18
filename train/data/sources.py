"""What one path setting stands for: documents in a fixed order, readable as often as needed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from train.data.files import TextFile, find_files
from train.data.library import LIBRARY_PATH, library_documents, library_files
from train.data.text import Document, read_documents, truncate_documents
from train.errors import UserError


@dataclasses.dataclass(frozen=True)
class TextSource:
    """The documents that one setting names. Nothing is kept in memory: each pass reads anew."""

    setting: str
    path: str
    files: tuple[TextFile, ...]
    text_field: str
    max_bytes: int

    @classmethod
    def find(
        cls, setting: str, path: str, *, text_field: str = "text", max_bytes: int = 0
    ) -> TextSource:
        """Finds the files that ``path``, the value of ``setting``, means (UserError: none)."""
        files = library_files() if path == LIBRARY_PATH else find_files(path, setting)
        return cls(setting, path, files, text_field, max_bytes)

    def documents(self) -> Iterator[Document]:
        """The documents, never empty ones (UserError: there is no text at all)."""
        if self.path == LIBRARY_PATH:
            documents = library_documents(self.files)
        else:
            documents = read_documents(self.files, text_field=self.text_field)
        nothing = True
        for document in truncate_documents(documents, self.max_bytes):
            nothing = False
            yield document
        if nothing:
            raise UserError(f"{self.setting} {self.path}: is empty; give a path that holds text")

    def fingerprint(self) -> list[object]:
        """What tells whether the text may have changed, as JSON: files, sizes and times."""
        version = [*sys.version_info] if self.path == LIBRARY_PATH else []
        files = [file.fingerprint() for file in self.files]
        return [version, self.text_field, self.max_bytes, files]

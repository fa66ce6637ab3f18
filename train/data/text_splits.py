"""Splits of running text: documents to train on, and documents that are held out."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from train.data.data_config import TextDataConfig
from train.data.files import SPLITS, Notes, TextFile, find_all_splits, find_splits, is_compressed
from train.data.text_files import (
    LIBRARY_PATH,
    Document,
    DocumentReader,
    check_unicode,
    library_documents,
    library_files,
    truncate_documents,
)
from train.errors import UserError
from train.runtime.stages import stage


class DocumentSplits(Protocol):
    """Documents of several splits, by name."""

    names: tuple[str, ...]
    """The splits."""
    notes: Notes
    """What the user should know of how the texts were read."""

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split."""
        ...

    def estimate_characters(self, split: str) -> float:
        """Return about how many characters a split has, for progress; 0 if that is not known."""
        ...

    def fingerprint(self) -> dict[str, object]:
        """Return JSON values that change if a split may have changed."""
        ...


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Documents of one path setting. They are not kept in memory: each pass reads them again."""

    setting: str
    path: str
    files: Sequence[TextFile]
    text_field: str
    max_bytes: int
    notes: Notes

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not empty. Raises UserError if there is no text at all."""
        if self.path == LIBRARY_PATH:
            documents = library_documents(self.files)
        else:
            setting = f"{self.setting.rpartition('.')[0]}.text_field"
            reader = DocumentReader(self.files, self.text_field, setting, self.notes)
            documents = reader.documents()
        is_empty = True
        for document in truncate_documents(documents, self.max_bytes):
            is_empty = False
            yield document
        if is_empty:
            raise UserError(f"{self.setting} {self.path}: is empty; give a path that holds text")

    def estimate_characters(self) -> float:
        """Return the bytes of the files, close to their characters; 0 if they are compressed."""
        if any(is_compressed(file.name) for file in self.files):
            return 0.0
        total = float(sum(file.fingerprint()[1] for file in self.files))
        return min(total, self.max_bytes) if self.max_bytes else total

    def fingerprint(self) -> list[object]:
        """Return JSON values that change if the text may have changed: files, sizes and times."""
        # The text of `python:library` is that of the interpreter, whose files may keep their times.
        version = [*sys.version_info] if self.path == LIBRARY_PATH else []
        files = [file.fingerprint() for file in self.files]
        return [version, self.text_field, self.max_bytes, files]


@dataclasses.dataclass(frozen=True)
class OwnTextSource:
    """Documents of one split of a dataset of the user. Each pass generates them again."""

    config: TextDataConfig
    split: str
    setting: str = "dataset"

    @property
    def path(self) -> str:
        """Name of the split, for error messages."""
        return f"{type(self.config).__name__}, split {self.split}"

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not empty. Raises UserError if there is no text at all."""
        is_empty = True
        for document in truncate_documents(self._texts(), self.config.max_bytes):
            is_empty = False
            yield document
        if is_empty:
            raise UserError(f"{self.setting} {self.path}: has no text; yield some from read_split")

    def _texts(self) -> Iterator[Document]:
        for index, text in enumerate(self.config.read_split(self.split) or ()):
            if not isinstance(text, str):
                raise UserError(
                    f"{self.setting} {self.path}, example {index}: is a {type(text).__name__}; "
                    "yield strings"
                )
            check_unicode(f"{self.setting} {self.path}, example {index}", "the text", text)
            if text:
                yield Document(f"{self.split}/{index}", text)

    def estimate_characters(self) -> float:
        """Return 0: only reading all texts would tell."""
        return 0.0

    def fingerprint(self) -> list[object]:
        """Return a digest of all texts: there are no files whose times could tell."""
        digest = hashlib.blake2b(digest_size=16)
        for document in self.documents():
            # Lengths keep texts apart: "ab", "c" and "a", "bc" are not the same documents.
            encoded = document.text.encode()
            digest.update(f"{len(encoded)} ".encode() + encoded)
        return [digest.hexdigest()]


def find_sources(config: TextDataConfig, section: str, notes: Notes) -> dict[str, TextSource]:
    """Return the source of each split that has files: of its own path, or of those of `path`.

    Args:
      config: The paths.
      section: Name of the settings that hold them, for error messages.
      notes: Receives what the files were taken for.

    Raises:
      UserError: A path has no files.
    """

    def find(path: str, setting: str, notes: Notes) -> Mapping[str, Sequence[TextFile]]:
        if path == LIBRARY_PATH:
            return {"train": library_files()}
        return find_splits(path, setting, notes)

    found = find_all_splits(
        config.path, config.validation_path, config.test_path, notes, section=section, find=find
    )
    return {
        split: TextSource(*each, config.text_field, config.max_bytes, notes)
        for split, each in found.items()
    }


@dataclasses.dataclass(frozen=True)
class Holdout:
    """Rule that divides documents into a training part and a held-out part."""

    indices: frozenset[int] = frozenset()
    """Whole documents that are held out."""
    start: int | None = None
    """Character, counted over all documents, from which on text is held out."""

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """Yield the documents of one of the two parts, in order."""
        before = 0
        for index, document in enumerate(documents):
            if self.start is None:
                if (index in self.indices) == held_out:
                    yield document
                continue
            size = document.num_characters
            cut = min(max(self.start - before, 0), size)
            before += size
            start, stop = (cut, size) if held_out else (0, cut)
            if start < stop:
                yield document.part(start, stop)


class TextSplits:
    """Documents of every split of a `TextDataConfig`.

    Attributes:
      names: The splits: "train", "validation" and, if there is one, "test".
      notes: What the user should know of how the data were read.
    """

    def __init__(self, config: TextDataConfig, section: str = "data"):
        """Find the files.

        Args:
          config: Paths and splits.
          section: Name of the settings that hold the paths, for error messages.
        """
        self._config = config
        self.notes = Notes()
        if config.has_own_examples:
            own = [each for each in SPLITS if config.read_split(each) is not None]
            self._sources: dict[str, TextSource | OwnTextSource] = {
                split: OwnTextSource(config, split) for split in ["train", *own]
            }
            self.names = tuple(dict.fromkeys(["train", "validation", *own]))
            return
        self._sources = dict(find_sources(config, section, self.notes))
        self.names = tuple(dict.fromkeys(["train", "validation", *self._sources]))

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split. The files are read again each time."""
        if split in ("train", "validation") and "validation" not in self._sources:
            documents = self._sources["train"].documents()
            return self.holdout.select(documents, held_out=split == "validation")
        return self._sources[split].documents()

    def estimate_characters(self, split: str) -> float:
        """See `DocumentSplits`."""
        if split not in ("train", "validation") or "validation" in self._sources:
            return self._sources[split].estimate_characters()
        fraction = self._config.validation_fraction
        share = fraction if split == "validation" else 1 - fraction
        return share * self._sources["train"].estimate_characters()

    @functools.cached_property
    def holdout(self) -> Holdout:
        """Rule that divides ``data.path``. It reads all of the text once, to measure it."""
        source, fraction = self._sources["train"], self._config.validation_fraction
        sizes = []
        with stage("reading the text", source.estimate_characters()) as progress:
            for document in source.documents():
                size = 0
                for piece in document.pieces():
                    size += len(piece)
                    progress.advance(len(piece))
                sizes.append((document.name, size))
        # Of a single document only a part can be held out: its end.
        if self._config.split_method == "documents" and len(sizes) > 1:
            return Holdout(choose_held_out_documents(sizes, fraction))
        total = sum(size for _, size in sizes)
        start = int(total * (1 - fraction))
        if not 0 < start < total:
            raise UserError(
                f"{source.setting} {source.path}: {total} characters are too few to hold out "
                f"{fraction:g} of them; give more text or set data.validation_path"
            )
        return Holdout(start=start)

    def fingerprint(self) -> dict[str, object]:
        """Return JSON values that change if a split may have changed."""
        prints: dict[str, object] = {
            split: source.fingerprint() for split, source in self._sources.items()
        }
        if "validation" not in self._sources:
            prints["held out"] = [self._config.split_method, self._config.validation_fraction]
        return prints


def choose_held_out_documents(sizes: list[tuple[str, int]], fraction: float) -> frozenset[int]:
    """Choose documents by a hash of their names, up to a fraction of all characters.

    The choice does not depend on the place of the corpus or on the order of reading. At least one
    document is chosen (the smallest, if none fits), and at least one is not.

    Args:
      sizes: Name and number of characters of each document, at least two of them.
      fraction: Maximum fraction of all characters to choose, between 0 and 1.

    Returns:
      The indices of the chosen documents.
    """
    remaining = fraction * sum(size for _, size in sizes)
    chosen = set()
    # By hash, a document that is added to the corpus leaves the order of the others as it is.
    for index in sorted(range(len(sizes)), key=lambda index: _hash(sizes[index][0])):
        if sizes[index][1] <= remaining:
            remaining -= sizes[index][1]
            chosen.add(index)
    smallest = min(range(len(sizes)), key=lambda index: (sizes[index][1], sizes[index][0]))
    return frozenset(chosen or {smallest})


def _hash(name: str) -> bytes:
    # Names of files may be no UTF-8; Python decodes them with surrogates.
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()

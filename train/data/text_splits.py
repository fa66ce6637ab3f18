"""Splits of running text: documents to train on, and documents that are held out."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from train.data.data_config import TextDataConfig
from train.data.files import (
    SPLITS,
    Notes,
    SplitFiles,
    TextFile,
    find_all_splits,
    find_splits,
    is_compressed,
)
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


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Documents of one split. They are not kept in memory."""

    documents: Callable[[], Iterator[Document]]
    """Reads the documents that are not empty, anew each time; UserError if there is none."""
    fingerprint: Callable[[], object]
    """Returns JSON values that change if the text may have changed."""
    num_characters: Callable[[], float] = lambda: 0.0
    """Returns about how many characters there are, for progress; 0 if that is not known."""


@dataclasses.dataclass(frozen=True)
class TextSplits:
    """Documents of every split: "train", "validation" and, if there is one, "test"."""

    sources: Mapping[str, TextSource]
    notes: Notes
    """What the user should know of how the texts are read."""

    @classmethod
    def find(cls, config: TextDataConfig, section: str = "data") -> "TextSplits":
        """Find the files. Error messages name settings of `section`."""
        notes = Notes()
        if config.has_own_examples:
            own = [each for each in SPLITS if config.read_split(each) is not None]
            sources = {
                split: _own_source(config, split) for split in dict.fromkeys(["train", *own])
            }
            place = f"dataset {type(config).__name__}"
        else:
            sources = find_sources(config, section, notes)
            place = f"{section}.path {config.path}"
        if "validation" not in sources:
            sources |= _hold_out_of(sources["train"], config, place)
        return cls({split: sources[split] for split in SPLITS if split in sources}, notes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sources)

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split. The files are read again each time."""
        return self.sources[split].documents()

    def num_characters(self, *names: str) -> float:
        """Return about how many characters some splits have; 0 if that is not known."""
        sizes = [self.sources[name].num_characters() for name in names]
        return sum(sizes) if all(sizes) else 0.0

    def fingerprint(self) -> dict[str, object]:
        """Return JSON values that change if a split may have changed."""
        return {split: source.fingerprint() for split, source in self.sources.items()}


def find_sources(config: TextDataConfig, section: str, notes: Notes) -> dict[str, TextSource]:
    """Return the source of each split that has files: of its own path, or of those of `path`."""

    def find(path: str, setting: str, notes: Notes) -> Mapping[str, Sequence[TextFile]]:
        if path == LIBRARY_PATH:
            return {"train": library_files()}
        return find_splits(path, setting, notes)

    paths = config.path, config.validation_path, config.test_path
    found = find_all_splits(*paths, notes, section=section, find=find)
    return {split: _file_source(each, config, section, notes) for split, each in found.items()}


def _file_source(
    found: SplitFiles, config: TextDataConfig, section: str, notes: Notes
) -> TextSource:
    setting, path, files = found
    is_library, limit = path == LIBRARY_PATH, config.max_bytes

    def documents() -> Iterator[Document]:
        if is_library:
            documents = library_documents(files)
        else:
            field_setting = f"{section}.text_field"
            documents = DocumentReader(files, config.text_field, field_setting, notes).documents()
        return _some(truncate_documents(documents, limit), f"{setting} {path}")

    def fingerprint() -> list[object]:
        # The text of `python:library` is that of the interpreter, whose files may keep their times.
        version = [*sys.version_info] if is_library else []
        return [version, config.text_field, limit, [file.fingerprint() for file in files]]

    def num_characters() -> float:
        if any(is_compressed(file.name) for file in files):
            return 0.0
        total = float(sum(file.fingerprint()[1] for file in files))  # bytes, nearly as many
        return min(total, limit) if limit else total

    return TextSource(documents, fingerprint, num_characters)


def _own_source(config: TextDataConfig, split: str) -> TextSource:
    """Return the documents of one split of a dataset of the user."""
    place = f"dataset {type(config).__name__}, split {split}"

    def texts() -> Iterator[Document]:
        for index, text in enumerate(config.read_split(split) or ()):
            where = f"{place}, example {index}"
            if not isinstance(text, str):
                raise UserError(f"{where}: is a {type(text).__name__}; yield strings")
            check_unicode(where, "the text", text)
            if text:
                yield Document(f"{split}/{index}", text)

    def documents() -> Iterator[Document]:
        return _some(truncate_documents(texts(), config.max_bytes), place)

    def fingerprint() -> str:  # there are no files whose times could tell
        digest = hashlib.blake2b(digest_size=16)
        for document in documents():
            # Lengths keep texts apart: "ab", "c" and "a", "bc" are not the same documents.
            encoded = document.text.encode()
            digest.update(f"{len(encoded)} ".encode() + encoded)
        return digest.hexdigest()

    return TextSource(documents, fingerprint)


def _some(documents: Iterator[Document], place: str) -> Iterator[Document]:
    """Yield the documents. Raises UserError if there are none."""
    first = next(documents, None)
    if first is None:
        raise UserError(f"{place}: is empty; give a path or a dataset that holds text")
    yield first
    yield from documents


def _hold_out_of(source: TextSource, config: TextDataConfig, place: str) -> dict[str, TextSource]:
    """Return the training part of a source, and its validation part."""

    @functools.cache
    def cuts() -> np.ndarray:
        """Read all of the text once, to measure it."""
        sizes = []
        with stage("reading the text", source.num_characters()) as progress:
            for document in source.documents():
                size = 0
                for piece in document.pieces():
                    size += len(piece)
                    progress.advance(len(piece))
                sizes.append((document.name, size))
        return hold_out(sizes, config, place, "characters")

    def training() -> Iterator[Document]:
        for document, (cut, size) in zip(source.documents(), cuts().tolist(), strict=True):
            if cut:
                yield document if cut == size else document.part(0, cut)

    def validation() -> Iterator[Document]:
        for document, (cut, size) in zip(source.documents(), cuts().tolist(), strict=True):
            if cut < size:
                yield document if not cut else document.part(cut, size)

    fraction = config.validation_fraction
    rule = ["held out", config.split_method, fraction]
    return {
        "train": TextSource(
            training, source.fingerprint, lambda: (1 - fraction) * source.num_characters()
        ),
        "validation": TextSource(
            validation, lambda: rule, lambda: fraction * source.num_characters()
        ),
    }


def hold_out(
    sizes: Sequence[tuple[str, int]], config: TextDataConfig, place: str, noun: str
) -> np.ndarray:  # [documents, 2] int64
    """Return for each document how much of its start is trained on, and its size.

    Args:
      sizes: Name and size of each document.
      config: The rule.
      place: The documents, for error messages.
      noun: Unit of the sizes, for error messages.

    Raises:
      UserError: There is too little to hold out a part.
    """
    total = np.array([size for _, size in sizes], np.int64)
    fraction = config.validation_fraction
    # Of a single document only a part can be held out: its end.
    if config.split_method == "documents" and len(sizes) > 1:
        trained = total.copy()
        trained[list(choose_held_out_documents(sizes, fraction))] = 0
        return np.stack([trained, total], axis=1)
    start = int(int(total.sum()) * (1 - fraction))
    if not 0 < start < total.sum():
        raise UserError(
            f"{place}: {total.sum()} {noun} are too few to hold out {fraction:g} of them; give "
            "more, or a validation split"
        )
    before = np.cumsum(total) - total
    return np.stack([np.clip(start - before, 0, total), total], axis=1)


def choose_held_out_documents(sizes: Sequence[tuple[str, int]], fraction: float) -> frozenset[int]:
    """Choose documents by a hash of their names, up to a fraction of all characters.

    The choice does not depend on the place of the corpus or on the order of reading. At least one
    document is chosen (the smallest, if none fits), and at least one is not.

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

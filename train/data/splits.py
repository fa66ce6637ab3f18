"""Which text belongs to which split: held out as whole documents, or as the tail of the text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from train.data.config import TextDataConfig
from train.data.sources import TextSource
from train.data.text import Document
from train.errors import UserError


class Holdout(Protocol):
    """Divides documents into those to train on and those held out."""

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """The documents of one of the two parts, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class DocumentHoldout:
    """Documents are held out whole, those with these numbers."""

    held_out: frozenset[int]

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """See `Cut`."""
        for number, document in enumerate(documents):
            if (number in self.held_out) == held_out:
                yield document


@dataclasses.dataclass(frozen=True)
class TailHoldout:
    """The characters from ``start`` on are held out, counted over all documents."""

    start: int

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """See `Cut`."""
        before = 0
        for name, text in documents:
            cut = min(max(self.start - before, 0), len(text))
            before += len(text)
            if kept := text[cut:] if held_out else text[:cut]:
                yield Document(name, kept)


class TextSplits:
    """The documents of every split that a DataConfig has.

    Attributes:
      names: The splits there are: "train", "validation" and, if it was asked for, "test".
    """

    def __init__(self, config: TextDataConfig):
        self._config = config
        self._sources = {
            split: TextSource.find(
                f"data.{setting}", path, text_field=config.text_field, max_bytes=config.max_bytes
            )
            for split, setting, path in (
                ("train", "path", config.path),
                ("validation", "validation_path", config.validation_path),
                ("test", "test_path", config.test_path),
            )
            if path or split == "train"
        }
        self.names = ("train", "validation", *(["test"] if config.test_path else []))

    def documents(self, split: str) -> Iterator[Document]:
        """The documents of a split; reads the files anew each time."""
        if split in ("train", "validation") and "validation" not in self._sources:
            documents = self._sources["train"].documents()
            return self.holdout.select(documents, held_out=split == "validation")
        return self._sources[split].documents()

    @functools.cached_property
    def holdout(self) -> Holdout:
        """How ``data.path`` is divided (reads all of it once, to measure it)."""
        source, fraction = self._sources["train"], self._config.validation_fraction
        sizes = [(document.name, len(document.text)) for document in source.documents()]
        if self._config.split_method == "documents" and len(sizes) > 1:
            return DocumentHoldout(choose_held_out_documents(sizes, fraction))
        total = sum(size for _, size in sizes)
        start = int(total * (1 - fraction))
        if not 0 < start < total:
            raise UserError(
                f"{source.setting} {source.path}: {total} characters are too few to hold out "
                f"{fraction:g} of them; give more text or set data.validation_path"
            )
        return TailHoldout(start)

    def fingerprint(self) -> dict[str, object]:
        """What tells whether any split may have changed, as JSON."""
        prints: dict[str, object] = {
            split: source.fingerprint() for split, source in self._sources.items()
        }
        if "validation" not in self._sources:
            prints["held out"] = [self._config.split_method, self._config.validation_fraction]
        return prints


def choose_held_out_documents(sizes: list[tuple[str, int]], fraction: float) -> frozenset[int]:
    """Draws documents by a hash of their names, up to a fraction of all characters.

    The same documents are drawn wherever the corpus lies and however often it is read. At least
    one is drawn (the smallest, if none fits) and at least one is not.

    Args:
      sizes: The name and the number of characters of each document, at least two of them.
      fraction: The part of all characters to draw at most, between 0 and 1.

    Returns:
      The numbers of the documents drawn.
    """
    left = fraction * sum(size for _, size in sizes)
    drawn = set()
    for number in sorted(range(len(sizes)), key=lambda number: _hash(sizes[number][0])):
        if sizes[number][1] <= left:
            left -= sizes[number][1]
            drawn.add(number)
    smallest = min(range(len(sizes)), key=lambda number: (sizes[number][1], sizes[number][0]))
    return frozenset(drawn or {smallest})


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()

"""Running text: find the files, split off held-out text, train the tokenizer, tokenize, cache."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from train.data.compression import compressed_bits_per_byte
from train.data.config import TextDataConfig, TokenizerConfig
from train.data.disk_cache import cache_folder, cache_key, get_or_create
from train.data.files import TextFile, find_files
from train.data.streams import TokenStream, read_stream, stream_is_complete, write_stream
from train.data.text_files import (
    LIBRARY_PATH,
    Document,
    library_documents,
    library_files,
    read_documents,
    truncate_documents,
)
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Documents of one path setting. They are not kept in memory: each pass reads them again."""

    setting: str
    path: str
    files: tuple[TextFile, ...]
    text_field: str
    max_bytes: int

    @classmethod
    def find(
        cls, setting: str, path: str, *, text_field: str = "text", max_bytes: int = 0
    ) -> "TextSource":
        """Return the source of ``path``, the value of ``setting``. UserError: it has no files."""
        files = library_files() if path == LIBRARY_PATH else find_files(path, setting)
        return cls(setting, path, files, text_field, max_bytes)

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not empty. Raises UserError if there is no text at all."""
        if self.path == LIBRARY_PATH:
            documents = library_documents(self.files)
        else:
            setting = f"{self.setting.rpartition('.')[0]}.text_field"
            documents = read_documents(self.files, text_field=self.text_field, setting=setting)
        is_empty = True
        for document in truncate_documents(documents, self.max_bytes):
            is_empty = False
            yield document
        if is_empty:
            raise UserError(f"{self.setting} {self.path}: is empty; give a path that holds text")

    def fingerprint(self) -> list[object]:
        """Return JSON values that change if the text may have changed: files, sizes and times."""
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
            if text:
                yield Document(f"{self.split}/{index}", text)

    def fingerprint(self) -> list[object]:
        """Return a digest of all texts: there are no files whose times could tell."""
        digest = hashlib.blake2b(digest_size=16)
        for document in self.documents():
            encoded = document.text.encode(errors="surrogatepass")
            digest.update(f"{len(encoded)} ".encode() + encoded)
        return [digest.hexdigest()]


class Holdout(Protocol):
    """Rule that divides documents into a training part and a held-out part."""

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """Yield the documents of one of the two parts, in order."""
        ...


@dataclasses.dataclass(frozen=True)
class DocumentHoldout:
    """Holds out whole documents, by index."""

    held_out: frozenset[int]

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """See `Holdout`."""
        for index, document in enumerate(documents):
            if (index in self.held_out) == held_out:
                yield document


@dataclasses.dataclass(frozen=True)
class TailHoldout:
    """Holds out the characters from ``start`` on, counted over all documents."""

    start: int

    def select(self, documents: Iterable[Document], *, held_out: bool) -> Iterator[Document]:
        """See `Holdout`."""
        before = 0
        for name, text in documents:
            cut = min(max(self.start - before, 0), len(text))
            before += len(text)
            if part := text[cut:] if held_out else text[:cut]:
                yield Document(name, part)


class TextSplits:
    """Documents of every split of a `TextDataConfig`.

    Attributes:
      names: The splits: "train", "validation" and, if it is configured, "test".
    """

    def __init__(self, config: TextDataConfig, section: str = "data"):
        """Find the files.

        Args:
          config: Paths and splits.
          section: Name of the settings that hold the paths, for error messages.
        """
        self._config = config
        if config.has_own_examples:
            own = [each for each in SPLITS if config.read_split(each) is not None]
            self._sources: dict[str, TextSource | OwnTextSource] = {
                split: OwnTextSource(config, split) for split in ["train", *own]
            }
            self.names = tuple(dict.fromkeys(["train", "validation", *own]))
            return
        self._sources = {
            split: TextSource.find(
                f"{section}.{setting}",
                path,
                text_field=config.text_field,
                max_bytes=config.max_bytes,
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
        """Yield the documents of a split. The files are read again each time."""
        if split in ("train", "validation") and "validation" not in self._sources:
            documents = self._sources["train"].documents()
            return self.holdout.select(documents, held_out=split == "validation")
        return self._sources[split].documents()

    @functools.cached_property
    def holdout(self) -> Holdout:
        """Rule that divides ``data.path``. It reads all of the text once, to measure it."""
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
    for index in sorted(range(len(sizes)), key=lambda index: _hash(sizes[index][0])):
        if sizes[index][1] <= remaining:
            remaining -= sizes[index][1]
            chosen.add(index)
    smallest = min(range(len(sizes)), key=lambda index: (sizes[index][1], sizes[index][0]))
    return frozenset(chosen or {smallest})


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()


# Version of the files in the cache. Increase it when their contents change.
_FORMAT = 1


_METADATA = "corpus.json"


_TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, eq=False)
class TextCorpus:
    """A tokenizer and the token streams of all splits.

    Attributes:
      tokenizer: Tokenizer of all streams.
      streams: Streams by split: "train", "validation" and, if it is configured, "test".
      digest: Digest of texts, splits and tokens: equal for equal data.
      labels: Empty: running text has no labels.
      notes: Empty.
    """

    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]
    digest: str
    _splits: TextSplits | None
    """Splits of the texts; None for token arrays, which have none."""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> TokenStream:
        """Return the stream of a split. Raises UserError if there is none of that name."""
        if name not in self.streams:
            remedy = "set data.test_path" if name == "test" else "choose one of these"
            raise UserError(
                f"split {name!r}: the data have only {', '.join(self.streams)}; {remedy}"
            )
        return self.streams[name]

    def compressed_bits_per_byte(self, name: str) -> dict[str, float]:
        """Return the bits per byte of gzip -9 and xz -9 on a split's text, which is read again.

        Empty for token arrays, which have no text.
        """
        stream = self.split(name)
        if self._splits is None:
            return {}
        return compressed_bits_per_byte(doc.text for doc in self._splits.documents(stream.name))


def prepare_tokenizer(config: TextDataConfig) -> Tokenizer:
    """Return the configured tokenizer, trained on the training split unless it is cached.

    Raises UserError as `prepare_text` does.
    """
    from train.data.token_arrays import read_token_arrays, tokenizer_of_arrays

    if (arrays := read_token_arrays(config)) is not None:
        return tokenizer_of_arrays(config, arrays)
    splits = TextSplits(config)
    return load_or_train_tokenizer(
        config.tokenizer, splits, splits.fingerprint(), cache_folder(config.cache_dir)
    )


def prepare_text(
    config: TextDataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    cache_dir: str | pathlib.Path | None = None,
    with_mask_token: bool = False,
    section: str = "data",
) -> TextCorpus:
    """Read, split and tokenize the text that ``config`` names, or find it in the cache.

    The cache key covers the settings, the sizes and times of the files, and the tokenizer, so that
    a run that brings its own tokenizer.json finds the tokens of its training.

    Args:
      config: Text, splits and tokenizer.
      tokenizer: Used instead of the one that ``config.tokenizer`` describes.
      cache_dir: Used instead of ``config.cache_dir``; a local folder.
      with_mask_token: Add a mask token to the tokenizer if it has none.
      section: Name of the settings that hold the paths, for error messages.

    Raises:
      UserError: The text is missing, empty or damaged, or the cache cannot be written.
    """
    from train.data.token_arrays import prepare_token_arrays, read_token_arrays, tokenizer_of_arrays

    if (arrays := read_token_arrays(config)) is not None:
        tokenizer = tokenizer or tokenizer_of_arrays(config, arrays)
        tokenizer = tokenizer.with_mask_token() if with_mask_token else tokenizer
        return prepare_token_arrays(config, arrays, tokenizer)
    folder = cache_folder(str(cache_dir or config.cache_dir))
    splits = TextSplits(config, section)
    sources = splits.fingerprint()
    if tokenizer is None:
        tokenizer = load_or_train_tokenizer(config.tokenizer, splits, sources, folder)
    if with_mask_token:
        tokenizer = tokenizer.with_mask_token()
    entry = folder / f"tokens-{cache_key(_FORMAT, sources, tokenizer.digest)}"
    get_or_create(entry, lambda partial: _write(partial, splits, tokenizer), _is_complete)
    metadata = json.loads((entry / _METADATA).read_text())
    streams = {name: read_stream(entry, name, metadata[name]) for name in splits.names}
    digest = cache_key(tokenizer.digest, [stream.digest for stream in streams.values()])
    return TextCorpus(tokenizer, streams, digest, splits)


class DocumentSplits(Protocol):
    """Documents of several splits, by name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The splits."""
        ...

    def documents(self, split: str) -> Iterator[Document]:
        """Yield the documents of a split."""
        ...


def load_or_train_tokenizer(
    settings: TokenizerConfig,
    splits: DocumentSplits,
    sources: dict[str, object],
    folder: pathlib.Path,
) -> Tokenizer:
    """Return the configured tokenizer, trained on the training split unless it is cached.

    Args:
      settings: Settings of the tokenizer.
      splits: Texts to train it on.
      sources: Fingerprint of the texts.
      folder: Cache.
    """
    if settings.kind == "file":
        return Tokenizer.load(settings.path)
    # A character tokenizer rejects unknown characters: its alphabet is that of all splits.
    names = splits.names if settings.kind == "character" else ("train",)
    entry = folder / f"tokenizer-{cache_key(_FORMAT, sources, dataclasses.asdict(settings))}"

    def write(partial: pathlib.Path) -> None:
        texts = (document.text for name in names for document in splits.documents(name))
        trained = train_tokenizer(settings, texts)
        (partial / _TOKENIZER).write_text(trained.to_json(), encoding="utf-8")

    return Tokenizer.load(get_or_create(entry, write) / _TOKENIZER)


def _write(folder: pathlib.Path, splits: TextSplits, tokenizer: Tokenizer) -> None:
    metadata = {}
    for name in splits.names:
        metadata[name] = write_stream(folder, name, splits.documents(name), tokenizer)
        if metadata[name]["documents"] == 0:
            raise UserError(f"the {name} split: has no words in it; give more text")
    (folder / _METADATA).write_text(json.dumps(metadata, indent=1))


def _is_complete(folder: pathlib.Path) -> bool:
    try:
        metadata: dict[str, dict[str, Any]] = json.loads((folder / _METADATA).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all(stream_is_complete(folder, name, metadata[name]) for name in metadata)

"""From what the data settings say to token streams: found, split, encoded, kept."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from train.data.cache import cache_folder, cache_key, get_or_create
from train.data.compression import compressed_bits_per_byte
from train.data.config import TextDataConfig
from train.data.splits import TextSplits
from train.data.streams import TokenStream, read_stream, stream_is_complete, write_stream
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

# Raise it when what is written changes, so that what is there is not taken for it.
_FORMAT = 1
_FACTS = "corpus.json"
_TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True, eq=False)
class TextCorpus:
    """A tokenizer and the streams of all splits.

    Attributes:
      tokenizer: The tokenizer of all streams.
      streams: By the name of the split: "train", "validation" and, if asked for, "test".
      digest: Tells corpora apart: equal if all texts, splits and tokens are.
      labels: None: text has no classes.
      notes: None.
    """

    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]
    digest: str
    _splits: TextSplits
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> TokenStream:
        """The stream of a split (UserError: there is none of that name)."""
        if name not in self.streams:
            remedy = "set data.test_path" if name == "test" else "choose one of these"
            raise UserError(
                f"split {name!r}: the data have only {', '.join(self.streams)}; {remedy}"
            )
        return self.streams[name]

    def compressed_bits_per_byte(self, name: str) -> dict[str, float]:
        """Bits a byte that gzip -9 and xz -9 need for the text of a split (reads it again)."""
        stream = self.split(name)
        return compressed_bits_per_byte(doc.text for doc in self._splits.documents(stream.name))


def prepare_tokenizer(config: TextDataConfig) -> Tokenizer:
    """The tokenizer of the settings, learned from the training split unless it is in the cache.

    Raises UserError as `prepare_corpus` does.
    """
    splits = TextSplits(config)
    return _obtain_tokenizer(config, splits, splits.fingerprint(), cache_folder(config.cache_dir))


def prepare_text(
    config: TextDataConfig,
    *,
    tokenizer: Tokenizer | None = None,
    cache_dir: str | pathlib.Path | None = None,
    with_mask_token: bool = False,
) -> TextCorpus:
    """Reads, splits and encodes the text that ``config`` names, or finds it in the cache.

    The cache is keyed by the settings, by the files' sizes and times, and by the tokenizer, so
    a run that brings its own tokenizer.json finds what its training encoded.

    Args:
      config: Which text, which split, which tokenizer.
      tokenizer: Used in place of what ``config.tokenizer`` describes.
      cache: Used in place of ``config.cache``; a local folder.
      mask: See that the tokenizer has a token to hide others with.

    Raises:
      UserError: The text is missing, empty or damaged, or the cache cannot be written.
    """
    folder = cache_folder(str(cache_dir or config.cache_dir))
    splits = TextSplits(config)
    sources = splits.fingerprint()
    if tokenizer is None:
        tokenizer = _obtain_tokenizer(config, splits, sources, folder)
    if with_mask_token:
        tokenizer = tokenizer.with_mask_token()
    entry = folder / f"tokens-{cache_key(_FORMAT, sources, tokenizer.digest)}"
    get_or_create(entry, lambda partial: _write(partial, splits, tokenizer), _is_whole)
    facts = json.loads((entry / _FACTS).read_text())
    streams = {name: read_stream(entry, name, facts[name]) for name in splits.names}
    digest = cache_key(tokenizer.digest, [stream.digest for stream in streams.values()])
    return TextCorpus(tokenizer, streams, digest, splits)


def _obtain_tokenizer(
    config: TextDataConfig, splits: TextSplits, sources: dict[str, object], folder: pathlib.Path
) -> Tokenizer:
    """The tokenizer of the settings, learned from the training split unless it is in the cache."""
    settings = config.tokenizer
    if settings.kind == "file":
        return Tokenizer.load(settings.path)
    # A character tokenizer can only take what it has met, so its alphabet is that of all splits.
    names = splits.names if settings.kind == "character" else ("train",)
    entry = folder / f"tokenizer-{cache_key(_FORMAT, sources, dataclasses.asdict(settings))}"

    def write(partial: pathlib.Path) -> None:
        texts = (document.text for name in names for document in splits.documents(name))
        learned = train_tokenizer(settings, texts)
        (partial / _TOKENIZER).write_text(learned.to_json(), encoding="utf-8")

    return Tokenizer.load(get_or_create(entry, write) / _TOKENIZER)


def _write(folder: pathlib.Path, splits: TextSplits, tokenizer: Tokenizer) -> None:
    facts = {}
    for name in splits.names:
        facts[name] = write_stream(folder, name, splits.documents(name), tokenizer)
        if facts[name]["documents"] == 0:
            raise UserError(f"the {name} split: has no words in it; give more text")
    (folder / _FACTS).write_text(json.dumps(facts, indent=1))


def _is_whole(folder: pathlib.Path) -> bool:
    try:
        facts: dict[str, dict[str, Any]] = json.loads((folder / _FACTS).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all(stream_is_complete(folder, name, facts[name]) for name in facts)

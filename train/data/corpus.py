"""Running text: find the files, split off held-out text, train the tokenizer, tokenize, cache.

A corpus can also be arrays of token ids that are given from Python.
"""

import dataclasses
import hashlib
import json
import lzma
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.files import split_of
from train.data.held_data import PYTHON_DATA_PREFIX, held_data
from train.data.text_splits import TextSplits, hold_out
from train.data.token_file import (
    DocumentFrame,
    TokenStream,
    read_stream,
    stream_is_complete,
    write_stream,
)
from train.data.tokenizer import Tokenizer, split_into_chunks
from train.data.tokenizer_training import token_id_tokenizer, train_tokenizer
from train.errors import UserError
from train.files import cache_folder, cache_key, get_or_create

# Version of the files in the cache. Increase it when their contents change.
_FORMAT = 3

_METADATA = "corpus.json"
_TOKENIZER = "tokenizer.json"

TokenArrays = Sequence[np.ndarray]
"""Token ids of each document of a split, each [n] int64."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextCorpus:
    """A tokenizer and the token streams of all splits."""

    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]
    """Streams by split: "train", "validation" and, if it is configured, "test"."""
    digest: str
    """Digest of texts, splits and tokens: equal for equal data."""
    texts: TextSplits | None = None
    """The texts; None for token arrays, which have none."""
    labels: tuple[str, ...] = ()
    """Empty: running text has no labels."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the text was read."""

    def split(self, name: str) -> TokenStream:
        """Return the stream of a split. Raises UserError if there is none of that name."""
        return split_of(self.streams, name)

    def compressed_bits_per_byte(self, name: str) -> dict[str, float]:
        """Return the bits per byte of gzip -9 and xz -9 on a split's text, which is read again.

        Empty for token arrays, which have no text.
        """
        if self.texts is None:
            return {}
        documents = self.texts.documents(self.split(name).name)
        return compressed_bits_per_byte(piece for each in documents for piece in each.pieces())


def prepare_text(
    config: TextDataConfig, *, tokenizer: Tokenizer | None = None, section: str = "data"
) -> TextCorpus:
    """Read, split and tokenize the text that ``config`` names, or find it in the cache.

    The cache key covers the settings, the sizes and times of the files, and the tokenizer, so that
    a run that brings its own tokenizer.json finds the tokens of its training.

    Args:
      config: Text, splits and tokenizer.
      tokenizer: Used instead of the one that ``config.tokenizer`` describes.
      section: Name of the settings that hold the paths, for error messages.

    Raises:
      UserError: The text is missing, empty or damaged, or the cache cannot be written.
    """
    if (arrays := read_token_arrays(config)) is not None:
        return prepare_token_arrays(
            config, arrays, tokenizer or tokenizer_of_arrays(config, arrays)
        )
    splits, folder = TextSplits.find(config, section), cache_folder(config.cache_dir)
    tokenizer = tokenizer or load_or_train_tokenizer(config.tokenizer, splits, folder)
    return tokenize_splits(splits, tokenizer, folder)


def tokenize_splits(splits: TextSplits, tokenizer: Tokenizer, folder: pathlib.Path) -> TextCorpus:
    """Return the token streams of splits, from the cache in `folder` if it has them."""
    # The files beside a tokenizer decide the separator, which its digest does not have.
    key = cache_key(_FORMAT, splits.fingerprint(), tokenizer.digest, tokenizer.eos_token_id)
    entry = folder / f"tokens-{key}"

    def write(partial: pathlib.Path) -> None:
        streams = {}
        for name in splits.names:
            size = splits.num_characters(name)
            streams[name] = write_stream(
                partial, name, splits.documents(name), tokenizer, num_characters=size
            )
            if streams[name]["documents"] == 0:
                raise UserError(f"the {name} split: has no words in it; give more text")
        metadata = {"streams": streams, "notes": splits.notes.lines()}
        (partial / _METADATA).write_text(json.dumps(metadata, indent=1))

    get_or_create(entry, write, _is_complete)
    metadata = json.loads((entry / _METADATA).read_text())
    streams = {name: read_stream(entry, name, metadata["streams"][name]) for name in splits.names}
    digest = cache_key(tokenizer.digest, [stream.digest for stream in streams.values()])
    return TextCorpus(tokenizer, streams, digest, splits, notes=tuple(metadata["notes"]))


def _is_complete(folder: pathlib.Path) -> bool:
    try:
        streams: dict[str, Any] = json.loads((folder / _METADATA).read_text())["streams"]
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all(stream_is_complete(folder, name, streams[name]) for name in streams)


def load_or_train_tokenizer(
    settings: TokenizerConfig, splits: TextSplits, folder: pathlib.Path
) -> Tokenizer:
    """Return the configured tokenizer, trained on the training split unless the cache has it."""
    if settings.kind == "file":
        return Tokenizer.load(settings.path)
    # A character tokenizer rejects unknown characters: its alphabet is that of all splits.
    names = splits.names if settings.kind == "character" else ("train",)
    key = cache_key(_FORMAT, splits.fingerprint(), dataclasses.asdict(settings))

    def write(partial: pathlib.Path) -> None:
        texts = (
            chunk
            for name in names
            for document in splits.documents(name)
            for chunk in split_into_chunks(document.pieces())
        )
        trained = train_tokenizer(settings, texts, num_characters=splits.num_characters(*names))
        (partial / _TOKENIZER).write_text(trained.to_json(), encoding="utf-8")

    return Tokenizer.load(get_or_create(folder / f"tokenizer-{key}", write) / _TOKENIZER)


_GZIP_CONTAINER = 16 + zlib.MAX_WBITS  # zlib's code for a gzip header and trailer


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` need for the texts as one file."""
    compressors: dict[str, Any] = {
        "gzip -9": zlib.compressobj(9, zlib.DEFLATED, _GZIP_CONTAINER),
        "xz -9": lzma.LZMACompressor(preset=9),
    }
    sizes = dict.fromkeys(compressors, 0)
    total = 0
    for text in texts:
        encoded = text.encode()
        total += len(encoded)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(encoded))
    for name, compressor in compressors.items():
        sizes[name] += len(compressor.flush())
    return {name: 8 * size / total for name, size in sizes.items()}


def read_token_arrays(config: TextDataConfig) -> dict[str, TokenArrays] | None:
    """Return the documents of each split, or None if the data are not token arrays."""
    if not config.path.startswith(PYTHON_DATA_PREFIX):
        return None
    data = held_data(config.path)
    return dict(data.splits) if data.has_token_arrays else None


def tokenizer_of_arrays(config: TextDataConfig, splits: dict[str, TokenArrays]) -> Tokenizer:
    """Return the tokenizer that the settings name, or else one of numbers: `5 17` is [5, 17]."""
    if config.tokenizer.is_given:
        return train_tokenizer(config.tokenizer, ())
    largest = max(int(array.max()) for arrays in splits.values() for array in arrays)
    return token_id_tokenizer(largest + 1)


def prepare_token_arrays(
    config: TextDataConfig, splits: dict[str, TokenArrays], tokenizer: Tokenizer
) -> TextCorpus:
    """Split token arrays, and concatenate each split in the tokenizer's frame.

    Raises:
      UserError: An id is beyond the vocabulary, or there are too few tokens to hold some out.
    """
    separators = not config.tokenizer.is_given
    for name, arrays in splits.items():
        for index, array in enumerate(arrays):
            _check_ids(f"data, split {name}, example {index}", array, tokenizer, separators)
    if "validation" not in splits:
        arrays = splits["train"]
        sizes = [(f"train/{index}", array.size) for index, array in enumerate(arrays)]
        cuts = hold_out(sizes, config, "data, split train", "tokens")[:, 0]
        train = [array[:cut] for array, cut in zip(arrays, cuts, strict=True) if cut]
        rest = [array[cut:] for array, cut in zip(arrays, cuts, strict=True) if cut < array.size]
        others = {name: arrays for name, arrays in splits.items() if name != "train"}
        splits = {"train": train, "validation": rest, **others}
    streams = {
        name: _concatenate(name, arrays, tokenizer, count_bytes=not separators)
        for name, arrays in splits.items()
    }
    digest = cache_key(tokenizer.digest, [stream.digest for stream in streams.values()])
    return TextCorpus(tokenizer, streams, digest)


def _check_ids(where: str, array: np.ndarray, tokenizer: Tokenizer, separators: bool) -> None:
    """Raise UserError for ids that the tokenizer does not have."""
    largest = int(array.max())
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"{where}: has the token id {largest}, and the tokenizer has {tokenizer.vocab_size} "
            "tokens; give arrays of its ids"
        )
    # The one that ends a document may end an array.
    own = array[:-1] if array[-1] == tokenizer.eos_token_id else array
    if separators and (special := tokenizer.special_token_ids.intersection(own.tolist())):
        raise UserError(
            f"{where}: has the token id {min(special)}, which the tokenizer keeps for itself "
            f"({tokenizer.eos_token_id} separates documents); leave it out"
        )


def _concatenate(
    name: str, arrays: TokenArrays, tokenizer: Tokenizer, *, count_bytes: bool
) -> TokenStream:
    """Return documents in the tokenizer's frame."""
    frame = DocumentFrame.of(tokenizer)
    before, after = (np.array(each, np.int64) for each in frame.around_pieces())
    pieces = [piece for piece in map(frame.piece, arrays) if len(piece)]
    lengths = [len(before), *map(len, pieces)]
    starts = np.cumsum(lengths)[:-1]
    tokens = np.concatenate([before, *pieces, after])
    tokens = tokens.astype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    num_bytes = sum(len(tokenizer.decode(array).encode()) for array in arrays) if count_bytes else 0
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return TokenStream(name, tokens, starts.astype(np.int64), num_bytes, digest, frame.first)

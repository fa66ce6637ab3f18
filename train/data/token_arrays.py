"""Corpora of token arrays, which are given from Python: split them, and make their tokenizer."""

import hashlib
from collections.abc import Sequence

import numpy as np

from train.data.corpus import TextCorpus
from train.data.data_config import PYTHON_DATA_PREFIX, TextDataConfig
from train.data.disk_cache import cache_key
from train.data.python_data import held_data
from train.data.text_splits import choose_held_out_documents
from train.data.token_file import TokenStream
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import token_id_tokenizer, train_tokenizer
from train.errors import UserError

TokenArrays = Sequence[np.ndarray]
"""Token ids of each document of a split, each [n] int64."""


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
    """Split token arrays and concatenate them.

    Args:
      config: Fraction to hold out if there is no validation split.
      splits: Documents of each split.
      tokenizer: Tokenizer whose ids the arrays hold.

    Raises:
      UserError: An id is beyond the vocabulary, or there are too few tokens to hold some out.
    """
    separators = not config.tokenizer.is_given
    for name, arrays in splits.items():
        for index, array in enumerate(arrays):
            _check_ids(f"data, split {name}, example {index}", array, tokenizer, separators)
    if "validation" not in splits:
        train, validation = _hold_out(config, splits["train"])
        splits = {"train": train, "validation": validation} | {
            name: arrays for name, arrays in splits.items() if name != "train"
        }
    streams = {
        name: _concatenate(name, arrays, tokenizer, count_bytes=not separators)
        for name, arrays in splits.items()
    }
    digest = cache_key(tokenizer.digest, [stream.digest for stream in streams.values()])
    return TextCorpus(tokenizer, streams, digest, None)


def _check_ids(where: str, array: np.ndarray, tokenizer: Tokenizer, separators: bool) -> None:
    """Raise UserError for ids that the tokenizer does not have."""
    largest = int(array.max())
    if largest >= tokenizer.vocab_size:
        raise UserError(
            f"{where}: has the token id {largest}, and the tokenizer has {tokenizer.vocab_size} "
            "tokens; give arrays of its ids"
        )
    if separators and tokenizer.special_token_ids.intersection(array.tolist()):
        raise UserError(
            f"{where}: has the token id {tokenizer.eos_token_id}, which separates documents; the "
            f"ids of this tokenizer are below {min(tokenizer.special_token_ids)}"
        )


def _hold_out(config: TextDataConfig, arrays: TokenArrays) -> tuple[TokenArrays, TokenArrays]:
    """Return the documents to train on, and those to validate on."""
    fraction = config.validation_fraction
    if config.split_method == "documents" and len(arrays) > 1:
        sizes = [(f"train/{index}", array.size) for index, array in enumerate(arrays)]
        held_out = choose_held_out_documents(sizes, fraction)
        train = [array for index, array in enumerate(arrays) if index not in held_out]
        return train, [arrays[index] for index in sorted(held_out)]
    total = sum(array.size for array in arrays)
    remaining = start = int(total * (1 - fraction))
    if not 0 < start < total:
        raise UserError(
            f"data, split train: {total} tokens are too few to hold out {fraction:g} of them; give "
            "more, or validation_data"
        )
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for array in arrays:
        cut = min(max(remaining, 0), array.size)
        remaining -= array.size
        for part, values in zip(parts, (array[:cut], array[cut:]), strict=True):
            if values.size:
                part.append(values)
    return parts


def _concatenate(
    name: str, arrays: TokenArrays, tokenizer: Tokenizer, *, count_bytes: bool
) -> TokenStream:
    """Return documents with one separator before each, and one at the end."""
    separator = np.array([tokenizer.eos_token_id])
    pieces, starts, length = [separator], [], 1
    for array in arrays:
        starts.append(length - 1)
        ends = array[-1] == separator[0]  # the document brings its own
        pieces += [array] if ends else [array, separator]
        length += array.size + (not ends)
    tokens = np.concatenate(pieces)
    tokens = tokens.astype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    num_bytes = sum(len(tokenizer.decode(array).encode()) for array in arrays) if count_bytes else 0
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return TokenStream(name, tokens, np.array(starts, np.int64), num_bytes, digest)

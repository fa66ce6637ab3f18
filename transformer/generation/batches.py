"""Batches of token sequences of different lengths: checks, order, padding and its segments."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from transformer.models.config import TransformerConfig
from transformer.validation import check_token_sequence

PROMPT_LENGTH_MULTIPLE, CACHE_LENGTH_MULTIPLE = 32, 128
"""Padded sequences and caches have multiples of these lengths, to limit compilations: see
`bucket_length`."""

Tokens = Sequence[int] | np.ndarray
"""One sequence of tokens."""


def bucket_length(length: int, multiple: int, limit: int | None) -> int:
    """Round a length up to a multiple of `multiple`; beyond 8 multiples, to 4 sizes an octave.

    Few compiled programs then serve all lengths, with at most 25% padding. Never above `limit`.
    """
    multiple = max(multiple, 2 ** (length - 1).bit_length() // 8)
    rounded = -(-length // multiple) * multiple
    return rounded if limit is None else min(rounded, limit)


def pad_right(
    rows: Sequence[np.ndarray],
    batch_size: int,  # B, at least the number of rows
    limit: int | None,  # largest T
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:  # tokens, lengths
    """Return rows in one array, padded with token 0; missing rows are one token 0."""
    longest = max(map(len, rows))
    length = bucket_length(longest, PROMPT_LENGTH_MULTIPLE, limit)
    tokens = np.zeros((batch_size, length), np.int32)
    lengths = np.ones(batch_size, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        lengths[index] = len(row)
    return tokens, lengths


def segments_of_lengths(
    lengths: Int[Array, "B"],  # without the padding
    padded_length: int,  # T
) -> Int[Array, "B T"]:
    """Return the segments of rows padded on the right: 1 where a token is no padding."""
    return (jnp.arange(padded_length)[None, :] < lengths[:, None]).astype(jnp.int32)


def batches_by_length(rows: Sequence[np.ndarray], batch_size: int) -> Iterator[list[int]]:
    """Yield indices of rows of similar lengths: little padding, and few shapes to compile."""
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index]), index))
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]


def check_fits(name: str, tokens: Tokens, config: TransformerConfig) -> None:
    """Raise ValueError if a sequence is longer than the model's learned positions."""
    if config.max_length is not None and len(tokens) > config.max_length:
        raise ValueError(
            f"{name}: {len(tokens):,} tokens are more than the model's {config.max_length:,} "
            "learned positions; shorten it"
        )


def check_sources(config: TransformerConfig, sources: Sequence[Tokens]) -> None:
    """Raise ValueError unless a model of this configuration can encode these sources."""
    for number, source in enumerate(sources):
        check_token_sequence(f"source {number}", source, config.source_vocab_size)
        check_fits(f"source {number}", source, config.source)

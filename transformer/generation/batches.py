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

TOKENS_PER_BATCH = 4096
"""Tokens of a batch of `batches_of_tokens`; a longer sequence is a batch of its own."""

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


def batches_of_tokens(lengths: Sequence[int], limit: int | None) -> Iterator[tuple[list[int], int]]:
    """Yield indices of sequences of similar lengths, and the number of rows of their batch.

    A batch has at most `TOKENS_PER_BATCH` tokens, with the padding of `pad_right`. The first has
    the longest sequences, so that it needs the most memory.
    """
    order = np.argsort(np.asarray(lengths, np.int64), kind="stable").tolist()
    while order:
        length = bucket_length(lengths[order[-1]], PROMPT_LENGTH_MULTIPLE, limit)
        # A power of two where fewer are left, so that few sequences do not cost a whole batch.
        fewer = 1 << (len(order) - 1).bit_length()
        num_rows = min(max(1, TOKENS_PER_BATCH // length), fewer)
        batch, order = order[-num_rows:], order[:-num_rows]
        yield batch, num_rows


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

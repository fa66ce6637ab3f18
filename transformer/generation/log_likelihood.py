"""Log-likelihoods of given sequences, in nats.

A model that predicts the next token assigns to the tokens x after a context c the probability

    log p(x | c) = sum over t of log softmax(logits before x_t)[x_t]

Sequences of any lengths are sorted by length and computed in padded batches, so that few compiled
programs serve all of them.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generation.generate import (
    PROMPT_LENGTH_MULTIPLE,
    bucket_length,
    pad_right,
    segments_of_lengths,
)
from transformer.generation.translate import check_sources
from transformer.losses import token_loss
from transformer.model_context import replicate
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import Params
from transformer.taps import NO_OUTPUTS
from transformer.validation import check_integer, check_token_sequence

TOKENS_PER_BATCH = 4096
"""Tokens of a batch, with the padding; a longer sequence is a batch of its own."""


class LogLikelihood(NamedTuple):
    """Log-likelihood of one sequence."""

    total: float
    """Sum over the scored tokens, in nats."""
    num_tokens: int
    """Tokens that are scored: those after the context."""


def log_likelihoods(
    model: LanguageModel | EncoderDecoder,
    params: Params,
    sequences: Sequence[Sequence[int] | np.ndarray],  # N of them, of any lengths
    *,
    context_lengths: Sequence[int] | None = None,  # N; None: 1 each
    sources: Sequence[Sequence[int] | np.ndarray] | None = None,  # N, of an encoder-decoder
) -> list[LogLikelihood]:
    """Return the log-likelihood of each sequence, given its first tokens.

    Args:
      model: The model.
      params: Its parameters.
      sequences: Token sequences. The first token is never scored, as nothing precedes it.
      context_lengths: First tokens of each sequence that are not scored, at least 1.
      sources: What the encoder of an `EncoderDecoder` reads for each sequence.

    Raises:
      ValueError: A sequence is empty or longer than the model's learned positions, has tokens that
        are not in its vocabulary, or a context that is not within it; sources are missing, or
        given to a model without an encoder.
    """
    contexts = [1] * len(sequences) if context_lengths is None else list(context_lengths)
    if len(contexts) != len(sequences):
        raise ValueError(
            f"context_lengths: {len(contexts)} for {len(sequences)} sequences; give one for each"
        )
    _check_sources(model, sequences, sources)
    for number, (sequence, context) in enumerate(zip(sequences, contexts, strict=True)):
        _check_sequence(number, sequence, context, model)
    rows = [np.asarray(each, np.int32) for each in sequences]
    read = None if sources is None else [np.asarray(each, np.int32) for each in sources]
    read_lengths = [0] * len(rows) if read is None else [len(each) for each in read]
    longest = [max(len(row), each) for row, each in zip(rows, read_lengths, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: (longest[i], i))
    totals = np.zeros(len(rows))
    while order:
        # From the longest, so that the first batch needs the most memory.
        length = _padded_length(longest[order[-1]], model)
        # A power of two where fewer are left, so that few sequences do not cost a whole batch.
        fewer = 1 << (len(order) - 1).bit_length()
        batch_size = min(max(1, TOKENS_PER_BATCH // length), fewer)
        group, order = order[-batch_size:], order[:-batch_size]
        row_length = _padded_length(max(len(rows[i]) for i in group), model)
        tokens, lengths = _pad([rows[i] for i in group], batch_size, row_length)
        source = None
        if read is not None:
            source_length = _padded_length(max(len(read[i]) for i in group), model)
            source = _pad([read[i] for i in group], batch_size, source_length)
        starts = np.ones(batch_size, np.int32)
        starts[: len(group)] = [contexts[i] for i in group]
        found = _score(params, tokens, lengths, starts, source, model=model)
        totals[group] = np.asarray(found)[: len(group)]
    return [
        LogLikelihood(float(total), len(row) - context)
        for total, row, context in zip(totals, rows, contexts, strict=True)
    ]


def _check_sources(
    model: LanguageModel | EncoderDecoder, sequences: Sequence[Any], sources: Sequence[Any] | None
) -> None:
    if isinstance(model, LanguageModel):
        if sources is not None:
            raise ValueError("sources: a LanguageModel has no encoder; leave them out")
        return
    if sources is None or len(sources) != len(sequences):
        count = "none" if sources is None else len(sources)
        raise ValueError(
            f"sources: {count} for {len(sequences)} sequences; give one for each sequence"
        )
    check_sources(model.config, sources)


def _check_sequence(
    number: int, sequence: Sequence[int] | np.ndarray, context: int, model: Any
) -> None:
    config = model.config
    check_token_sequence(
        f"sequence {number}",
        sequence,
        config.vocab_size,
        if_empty="begin it with the end-of-text token",
    )
    check_integer(f"context_lengths[{number}]", context, 1)
    if context > len(sequence):
        raise ValueError(
            f"context_lengths[{number}] {context}: the sequence has {len(sequence)} tokens; give "
            "less"
        )
    if config.max_length is not None and len(sequence) > config.max_length:
        raise ValueError(
            f"sequence {number}: {len(sequence):,} tokens are more than the model's "
            f"{config.max_length:,} learned positions; shorten it"
        )


def _padded_length(length: int, model: Any) -> int:
    return bucket_length(length, PROMPT_LENGTH_MULTIPLE, model.config.max_length)


def _pad(
    rows: list[np.ndarray], batch_size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:  # [B, T], [B] lengths
    """Return rows padded on the right; missing rows are one token 0."""
    rows = rows + [np.zeros(1, np.int32)] * (batch_size - len(rows))
    return pad_right(rows, length), np.array([len(row) for row in rows], np.int32)


@functools.partial(jax.jit, static_argnames=("model",))
def _score(
    params: Params,
    tokens: jax.Array,  # [B, T] padded on the right
    lengths: jax.Array,  # [B] without the padding
    starts: jax.Array,  # [B] index of the first token that is scored
    source: tuple[jax.Array, jax.Array] | None,  # [B, S] and [B], padded likewise
    *,
    model: LanguageModel | EncoderDecoder,
) -> jax.Array:  # [B] float32
    length = tokens.shape[1]
    index = jnp.arange(length)[None, :]
    # The number of tokens decides the angles of some rotary embeddings: padding has no position.
    positions = jnp.where(index < lengths[:, None], index, -1)
    variables, outputs = {"params": params}, NO_OUTPUTS
    if isinstance(model, LanguageModel):
        segments = segments_of_lengths(model, lengths, length)
        hidden = model.apply(
            variables, tokens, positions=positions, segments=segments, outputs=outputs
        ).hidden
    else:
        assert source is not None
        read, read_lengths = source
        read_segments = jnp.arange(read.shape[1])[None, :] < read_lengths[:, None]
        hidden = model.apply(
            variables,
            read,
            tokens,
            source_segments=read_segments.astype(jnp.int32),
            positions=positions,
            segments=(index < lengths[:, None]).astype(jnp.int32),
            outputs=outputs,
        ).hidden
    targets = jnp.roll(tokens, -1, axis=1)
    scored = (index + 1 >= starts[:, None]) & (index + 1 < lengths[:, None])

    def score_row(row: dict[str, jax.Array]) -> jax.Array:
        batch = jax.tree.map(lambda each: each[None], row)
        # In chunks of T, so that the logits fit.
        return -token_loss(model, params, batch["hidden"], batch)["loss"].total

    rows = {"hidden": hidden, "targets": targets, "weights": scored.astype(jnp.float32)}
    scores: jax.Array = replicate(model.constrain, jax.lax.map(score_row, rows))
    return scores

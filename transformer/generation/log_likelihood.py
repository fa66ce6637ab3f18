"""Log-likelihoods of given sequences, in nats.

A model that predicts the next token assigns to the tokens x after a context c the probability

    log p(x | c) = sum over t of log softmax(logits before x_t)[x_t]

Sequences of any lengths are sorted by length and computed in padded batches, so that few compiled
programs serve all of them.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from transformer.generation.batches import (
    Tokens,
    batches_of_tokens,
    check_fits,
    check_sources,
    pad_right,
    segments_of_lengths,
)
from transformer.generation.generate import segments_if_supported
from transformer.losses import token_loss
from transformer.model_context import replicate
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import Params
from transformer.taps import NO_OUTPUTS
from transformer.validation import check_integer, check_token_sequence


class LogLikelihood(NamedTuple):
    """Log-likelihood of one sequence."""

    total: float
    """Sum over the scored tokens, in nats."""
    num_tokens: int
    """Tokens that are scored: those after the context."""


def log_likelihoods(
    model: LanguageModel | EncoderDecoder,
    params: Params,
    sequences: Sequence[Tokens],  # N of them, of any lengths
    *,
    context_lengths: Sequence[int] | None = None,  # N; None: 1 each
    sources: Sequence[Tokens] | None = None,  # N, of an encoder-decoder
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
    limit = model.config.max_length
    rows = [np.asarray(sequence, np.int32) for sequence in sequences]
    longest = np.array([len(row) for row in rows], np.int32)
    source_rows: list[np.ndarray] = []
    if sources is not None:
        source_rows = [np.asarray(source, np.int32) for source in sources]
        longest = np.maximum(longest, [len(source) for source in source_rows])
    totals = np.zeros(len(rows))
    for batch, batch_size in batches_of_tokens(longest.tolist(), None):
        tokens, lengths = pad_right([rows[index] for index in batch], batch_size, limit)
        source = None
        if source_rows:
            source = pad_right(
                [source_rows[index] for index in batch], batch_size, model.config.source.max_length
            )
        starts = np.ones(batch_size, np.int32)
        starts[: len(batch)] = [contexts[index] for index in batch]
        found = _score(params, tokens, lengths, starts, source, model=model)
        totals[batch] = np.asarray(found)[: len(batch)]
    return [
        LogLikelihood(float(total), len(row) - context)
        for total, row, context in zip(totals, rows, contexts, strict=True)
    ]


def _check_sources(
    model: LanguageModel | EncoderDecoder,
    sequences: Sequence[Tokens],
    sources: Sequence[Tokens] | None,
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
    number: int, sequence: Tokens, context: int, model: LanguageModel | EncoderDecoder
) -> None:
    check_token_sequence(
        f"sequence {number}",
        sequence,
        model.config.vocab_size,
        if_empty="begin it with the end-of-text token",
    )
    check_integer(f"context_lengths[{number}]", context, 1)
    if context > len(sequence):
        raise ValueError(
            f"context_lengths[{number}] {context}: the sequence has {len(sequence)} tokens; give "
            "less"
        )
    check_fits(f"sequence {number}", sequence, model.config)


@functools.partial(jax.jit, static_argnames=("model",))
def _score(
    params: Params,
    tokens: Int[Array, "B T"],  # padded on the right
    lengths: Int[Array, "B"],  # without the padding
    starts: Int[Array, "B"],  # index of the first token that is scored
    source: tuple[Int[Array, "B S"], Int[Array, "B"]] | None,  # padded likewise
    *,
    model: LanguageModel | EncoderDecoder,
) -> Float32[Array, "B"]:
    length = tokens.shape[1]
    index = jnp.arange(length)[None, :]
    # The number of tokens decides the angles of some rotary embeddings: padding has no position.
    positions = jnp.where(index < lengths[:, None], index, -1)
    variables = {"params": params}
    if isinstance(model, LanguageModel):
        hidden = model.apply(
            variables,
            tokens,
            positions=positions,
            segments=segments_if_supported(model, lengths, length),
            outputs=NO_OUTPUTS,
        ).hidden
    else:
        assert source is not None
        source_tokens, source_lengths = source
        hidden = model.apply(
            variables,
            source_tokens,
            tokens,
            source_segments=segments_of_lengths(source_lengths, source_tokens.shape[1]),
            positions=positions,
            segments=segments_of_lengths(lengths, length),
            outputs=NO_OUTPUTS,
        ).hidden
    targets = jnp.roll(tokens, -1, axis=1)
    scored = (index + 1 >= starts[:, None]) & (index + 1 < lengths[:, None])

    def score_row(row: dict[str, jax.Array]) -> jax.Array:
        batch = jax.tree.map(lambda leaf: leaf[None], row)
        # In chunks of T, so that the logits fit.
        return -token_loss(model, params, batch["hidden"], batch)["loss"].total

    rows = {"hidden": hidden, "targets": targets, "weights": scored.astype(jnp.float32)}
    scores: jax.Array = replicate(model.constrain, jax.lax.map(score_row, rows))
    return scores

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

from transformer.chunked_cross_entropy import TokenLogProbs
from transformer.generation.batches import (
    Tokens,
    batches_of_tokens,
    check_fits,
    check_sources,
    pad_right,
    segments_of_lengths,
)
from transformer.generation.generate import segments_if_supported
from transformer.losses import token_log_probs
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
    is_greedy: bool
    """Each of them is the model's likeliest token."""


class TokenLogLikelihoods(NamedTuple):
    """Log-likelihoods of the T - 1 tokens after the first of one sequence, in nats."""

    values: Float32[np.ndarray, "T-1"]
    top_values: Float32[np.ndarray, "T-1 K"]
    """Those of the K likeliest tokens, in descending order."""
    top_tokens: Int[np.ndarray, "T-1 K"]


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
      ValueError: A sequence is empty or longer than the model's learned positions and one (the
        last token is only predicted), has tokens that are not in its vocabulary, or a context that
        is not within it; sources are missing, or given to a model without an encoder.
    """
    contexts = [1] * len(sequences) if context_lengths is None else list(context_lengths)
    if len(contexts) != len(sequences):
        raise ValueError(
            f"context_lengths: {len(contexts)} for {len(sequences)} sequences; give one for each"
        )
    _check_sources(model, sequences, sources)
    for number, (sequence, context) in enumerate(zip(sequences, contexts, strict=True)):
        _check_sequence(number, sequence, context, model)
    scores = _score_sequences(model, params, sequences, sources, num_top=1)
    found = []
    for sequence, context, each in zip(sequences, contexts, scores, strict=True):
        scored = slice(context - 1, None)
        total = float(np.sum(each.values[scored], dtype=np.float64))
        is_greedy = bool(np.all(each.top_tokens[scored, 0] == np.asarray(sequence)[context:]))
        found.append(LogLikelihood(total, len(sequence) - context, is_greedy))
    return found


def token_log_likelihoods(
    model: LanguageModel,
    params: Params,
    sequences: Sequence[Tokens],  # N of them, of any lengths
    *,
    num_top: int = 1,
) -> list[TokenLogLikelihoods]:
    """Return the log-likelihood of each token after the first of each sequence.

    With it come those of the `num_top` likeliest tokens in its place, at most as many as the
    vocabulary has. ValueError: as in `log_likelihoods`.
    """
    check_integer("num_top", num_top, 1)
    for number, sequence in enumerate(sequences):
        _check_sequence(number, sequence, 1, model)
    return _score_sequences(model, params, sequences, None, num_top=num_top)


def _score_sequences(
    model: LanguageModel | EncoderDecoder,
    params: Params,
    sequences: Sequence[Tokens],
    sources: Sequence[Tokens] | None,
    *,
    num_top: int,
) -> list[TokenLogLikelihoods]:
    """Return the scores of checked sequences, computed in batches of similar lengths."""
    limit = model.config.max_length
    rows = [np.asarray(sequence, np.int32) for sequence in sequences]
    # The last token is predicted and not read. A sequence of one token has a score to drop.
    inputs = [row[: max(1, len(row) - 1)] for row in rows]
    longest = np.array([len(row) for row in inputs], np.int32)
    source_rows: list[np.ndarray] = []
    if sources is not None:
        source_rows = [np.asarray(source, np.int32) for source in sources]
        longest = np.maximum(longest, [len(source) for source in source_rows])
    scores: dict[int, TokenLogLikelihoods] = {}
    for batch, batch_size in batches_of_tokens(longest.tolist(), None):
        tokens, lengths = pad_right([inputs[index] for index in batch], batch_size, limit)
        targets = np.zeros_like(tokens)
        for place, index in enumerate(batch):
            targets[place, : len(rows[index]) - 1] = rows[index][1:]
        source = None
        if source_rows:
            source = pad_right(
                [source_rows[index] for index in batch], batch_size, model.config.source.max_length
            )
        found = _score(params, tokens, targets, lengths, source, model=model, num_top=num_top)
        leaves = [np.asarray(leaf) for leaf in found]
        for place, index in enumerate(batch):
            scores[index] = TokenLogLikelihoods(
                *(leaf[place, : len(rows[index]) - 1] for leaf in leaves)
            )
    return [scores[index] for index in range(len(rows))]


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
    check_fits(f"sequence {number}", sequence[:-1], model.config)


@functools.partial(jax.jit, static_argnames=("model", "num_top"))
def _score(
    params: Params,
    tokens: Int[Array, "B T"],  # padded on the right
    targets: Int[Array, "B T"],  # the token after each
    lengths: Int[Array, "B"],  # without the padding
    source: tuple[Int[Array, "B S"], Int[Array, "B"]] | None,  # padded likewise
    *,
    model: LanguageModel | EncoderDecoder,
    num_top: int,
) -> TokenLogProbs:
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
    scores = token_log_probs(model, params, hidden, targets, num_top=num_top)
    replicated: TokenLogProbs = replicate(model.constrain, scores)
    return replicated

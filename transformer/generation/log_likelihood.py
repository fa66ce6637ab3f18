"""Log-likelihoods of given sequences, in nats.

A model that predicts the next token assigns to the tokens x after a context c the probability

    log p(x | c) = sum over t of log softmax(logits before x_t)[x_t]

Sequences of any lengths are sorted by length and computed in padded batches, so that few compiled
programs serve all of them. Logits [B, T, V] are the largest array of the computation: they are
computed for a part of T at a time.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.argument_checks import check_arguments
from transformer.attention.mixer import NO_OUTPUTS, mixer_class
from transformer.generation.generate import PROMPT_LENGTH_MULTIPLE, bucket_length
from transformer.generation.translate import check_sources
from transformer.layers.embedding import compute_logits, get_output_matrix
from transformer.layers.stack_weights import Params
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.input_checks import check_token_ids
from transformer.models.language_model import LanguageModel
from transformer.models.parameter_checks import check_params
from transformer.validation import check_integer, check_sequences

TOKENS_PER_BATCH = 4096
"""Tokens of a batch, with the padding; a longer sequence is a batch of its own."""

LOGITS_PER_CHUNK = 1 << 25
"""Logits computed at a time, at most: 128 MiB in float32."""


class LogLikelihood(NamedTuple):
    """Log-likelihood of one sequence."""

    total: float
    """Sum over the scored tokens, in nats."""
    num_tokens: int
    """Tokens that are scored: those after the context."""


@check_arguments
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
    check_params(params)
    check_sequences("sequences", sequences)
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
        padded = _pad([rows[i] for i in group], batch_size, row_length)
        source = None
        if read is not None:
            source_length = _padded_length(max(len(read[i]) for i in group), model)
            source = _pad([read[i] for i in group], batch_size, source_length)
        starts = np.ones(batch_size, np.int32)
        starts[: len(group)] = [contexts[i] for i in group]
        found = _score(params, *padded, starts, source, model=model)
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
    check_sequences("sources", sources)
    check_sources(model.config, sources)


def _check_sequence(
    number: int, sequence: Sequence[int] | np.ndarray, context: int, model: Any
) -> None:
    config = model.config
    remedy = "begin it with the end-of-text token"
    check_token_ids(f"sequence {number}", sequence, config.vocab_size, if_empty=remedy)
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
    tokens, lengths = np.zeros((batch_size, length), np.int32), np.ones(batch_size, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        lengths[number] = len(row)
    return tokens, lengths


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
    batch, length = tokens.shape
    index = jnp.arange(length)[None, :]
    is_token = index < lengths[:, None]
    segments = is_token.astype(jnp.int32)
    # The number of tokens decides the angles of some rotary embeddings: padding has no position.
    positions = jnp.where(is_token, index, -1)
    variables, outputs = {"params": params}, NO_OUTPUTS
    if source is not None:
        read, read_lengths = source
        read_segments = jnp.arange(read.shape[1])[None, :] < read_lengths[:, None]
        hidden = model.apply(
            variables,
            read,
            tokens,
            source_segments=read_segments.astype(jnp.int32),
            positions=positions,
            segments=segments,
            outputs=outputs,
        ).hidden
    else:
        # A causal mixer never shows the padding to earlier tokens. Segments also keep it out of
        # what tokens share, such as the buckets of hashing attention, where they are supported.
        shown = segments if _supports_segments(model) else None
        hidden = model.apply(
            variables, tokens, positions=positions, segments=shown, outputs=outputs
        ).hidden
    targets = jnp.roll(tokens, -1, axis=1)
    scored = (index + 1 >= starts[:, None]) & (index + 1 < lengths[:, None])
    chunk = max(1, min(length, LOGITS_PER_CHUNK // (batch * model.config.padded_vocab_size)))
    spare = -length % chunk

    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] to [chunks, B, chunk, ...]
        x = jnp.pad(x, ((0, 0), (0, spare), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    matrix = get_output_matrix(params, model.config)

    def score_chunk(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:  # [B]
        hidden, targets, scored = inputs
        logits = compute_logits(hidden, matrix, model.config, model.context).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        # `where` and not a product: padding may have logits that are not finite.
        return jnp.sum(jnp.where(scored, picked - jax.nn.logsumexp(logits, axis=-1), 0), axis=1)

    return jnp.sum(jax.lax.map(score_chunk, (split(hidden), split(targets), split(scored))), axis=0)


def _supports_segments(model: LanguageModel | EncoderDecoder) -> bool:
    mixers = {block.mixer for block in model.config.layer_pattern}
    return all(mixer_class(mixer).abilities(mixer).segments for mixer in mixers)

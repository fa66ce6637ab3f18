"""Decoding of encoder-decoders: what a model makes of source sequences, by beam search."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generation.beam_search import NO_TOKEN, BeamSearchConfig, Hypotheses, beam_search
from transformer.generation.decode_weights import Params, unstack_for_decoding_without_copy
from transformer.generation.generate import (
    CACHE_LENGTH_MULTIPLE,
    PROMPT_LENGTH_MULTIPLE,
    bucket_length,
)
from transformer.models.base import LOGITS
from transformer.models.encoder_decoder import EncoderDecoder


class TranslateOutput(NamedTuple):
    """What a model makes of each source."""

    tokens: list[list[int]]
    """The best hypothesis, without the stop token."""
    scores: list[float]
    """log P over its length penalty."""


def translate(
    model: EncoderDecoder,
    params: Params,
    sources: Sequence[Sequence[int] | np.ndarray],  # B of them, of any lengths
    *,
    start_token: int,
    stop_token: int,
    beam_search_config: BeamSearchConfig = BeamSearchConfig(),  # noqa: B008
    extra_length: int = 50,
    length_factor: float = 1.0,
    batch_size: int = 32,
) -> TranslateOutput:
    """The likeliest targets, each of at most factor * (length of its source) + extra tokens.

    Sources are taken in order of length, `batch_size` at a time, and come back in their own order.
    Raises ValueError for a source that is empty or that the model cannot read.
    """
    rows = [np.asarray(source, np.int32) for source in sources]
    _check(model, rows)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    tokens: list[list[int]] = [[] for _ in rows]
    scores = [0.0] * len(rows)
    prepared = {
        **params,
        "decoder": unstack_for_decoding_without_copy(params["decoder"]),
    }  # the encoder runs once
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        found = _batch(
            model,
            prepared,
            [rows[i] for i in group],
            start_token,
            stop_token,
            beam_search_config,
            extra_length,
            length_factor,
            batch_size,
        )
        for row, i in enumerate(group):
            best = np.asarray(found.tokens[row, 0])
            tokens[i] = best[best != NO_TOKEN].tolist()
            scores[i] = float(found.scores[row, 0])
    return TranslateOutput(tokens, scores)


def _check(model: EncoderDecoder, rows: list[np.ndarray]) -> None:
    limit = model.config.max_length
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"source {number}: is empty; give it at least one token")
        if limit is not None and len(row) > limit:
            raise ValueError(
                f"source {number}: {len(row)} tokens are more than the model's {limit} learned "
                "positions; shorten it"
            )


def _batch(
    model: EncoderDecoder,
    params: Params,
    rows: list[np.ndarray],
    begin: int,
    stop: int,
    beams: BeamSearchConfig,
    extra: int,
    factor: float,
    batch_size: int,
) -> Hypotheses:
    limit = model.config.max_length
    longest = max(map(len, rows))
    length = bucket_length(longest, PROMPT_LENGTH_MULTIPLE, limit)
    source = np.zeros((batch_size, length), np.int32)  # rows that are not there are one token 0
    lengths = np.ones(batch_size, np.int32)
    for number, row in enumerate(rows):
        source[number, : len(row)] = row
        lengths[number] = len(row)
    limits = np.ceil(factor * lengths).astype(np.int32) + extra
    most = bucket_length(int(np.ceil(factor * length)) + extra, CACHE_LENGTH_MULTIPLE, limit)
    limits = np.where(np.arange(batch_size) < len(rows), np.minimum(limits, most), 1)
    return jax.device_get(
        _search(params, source, lengths, limits, begin, stop, model=model, beams=beams, length=most)
    )


@functools.partial(jax.jit, static_argnames=("model", "beams", "length"))
def _search(
    params: Params,
    source: jax.Array,  # [B, S]
    lengths: jax.Array,  # [B]
    limits: jax.Array,  # [B]
    begin: jax.Array,
    stop: jax.Array,
    *,
    model: EncoderDecoder,
    beams: BeamSearchConfig,
    length: int,
) -> Hypotheses:
    batch, size = source.shape
    segments = (jnp.arange(size)[None, :] < lengths[:, None]).astype(jnp.int32)
    variables = {"params": params}
    first = jnp.full((batch, 1), begin, jnp.int32)
    start = model.apply(
        variables,
        source,
        first,
        source_segments=segments,
        positions=jnp.zeros((batch, 1), jnp.int32),
        cache=model.init_cache(batch, length, size),
        outputs=LOGITS,
    )
    seen = jnp.repeat(segments, beams.num_beams, axis=0)

    def advance(cache: Any, tokens: jax.Array, positions: jax.Array) -> tuple[Any, jax.Array]:
        output = model.apply(
            variables,
            None,
            tokens[:, None],
            source_segments=seen,
            positions=positions[:, None],
            cache=cache,
            outputs=LOGITS,
        )
        assert output.logits is not None
        return output.cache, output.logits[:, 0]

    assert start.logits is not None
    return beam_search(
        advance,
        start.cache,
        start.logits[:, 0],
        jnp.ones(batch, jnp.int32),
        limits,
        stop,
        config=beams,
        max_new_tokens=length,
    )

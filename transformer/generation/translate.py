"""Translation: decoding an encoder-decoder by beam search."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer.generation.batches import (
    CACHE_LENGTH_MULTIPLE,
    Tokens,
    batches_by_length,
    bucket_length,
    check_sources,
    pad_right,
    segments_of_lengths,
)
from transformer.generation.beam_search import (
    MIN_LOG_PROB,
    NO_TOKEN,
    BeamSearchConfig,
    Hypotheses,
    beam_search,
)
from transformer.generation.generate import stop_token_array
from transformer.model_context import replicate
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.model import LOGITS
from transformer.models.unstacked import Params, unstack_where_memory_allows
from transformer.validation import check_integer, check_token_sequence


class TranslateOutput(NamedTuple):
    """Result of `translate`, for each source."""

    tokens: list[list[int]]
    """Best hypothesis, without the stop token."""
    scores: list[float]
    """Its log-probability divided by the length penalty."""


def translate(
    model: EncoderDecoder,
    params: Params,
    sources: Sequence[Tokens],  # B of them, of any lengths
    *,
    start_token: int,
    stop_token: int | Sequence[int],
    first_token: int | None = None,
    beam_search_config: BeamSearchConfig = BeamSearchConfig(),  # noqa: B008
    extra_length: int = 50,
    length_factor: float = 1.0,
    batch_size: int = 32,
) -> TranslateOutput:
    """Translate sources by beam search.

    Sources are sorted by length and decoded in batches; results are in the given order.

    Args:
      model: The model.
      params: Its parameters.
      sources: Token sequences of any lengths.
      start_token: First input token of the decoder.
      stop_token: Token that ends a hypothesis, or several.
      first_token: Token that every target begins with, whatever the model predicts, such as that of
        a language (`forced_bos_token_id` in transformers); it has probability 1. None: any.
      beam_search_config: Beam width and length penalty.
      extra_length: A target has at most `length_factor` * (source length) + `extra_length` tokens.
      length_factor: See `extra_length`.
      batch_size: Sources decoded together.

    Raises:
      ValueError: For an empty source, one longer than the model's learned positions, or tokens
        that are not in its vocabularies.
    """
    check_sources(model.config, sources)
    check_token_sequence("start_token", [start_token], model.config.vocab_size)
    if first_token is not None:
        check_token_sequence("first_token", [first_token], model.config.vocab_size)
    stop_tokens = stop_token_array(stop_token, model.config.vocab_size)
    check_integer("batch_size", batch_size, 1)
    check_integer("extra_length", extra_length, 0)
    if length_factor < 0:
        raise ValueError(f"length_factor {length_factor}: give 0 or more")
    rows = [np.asarray(source, np.int32) for source in sources]
    tokens: list[list[int]] = [[] for _ in rows]
    scores = [0.0] * len(rows)
    limit = model.config.max_length
    # The decoder only: the encoder runs once for each batch.
    prepared = {**params, "decoder": unstack_where_memory_allows(params["decoder"])}
    for batch in batches_by_length(rows, batch_size):
        source, lengths = pad_right(
            [rows[index] for index in batch], batch_size, model.config.source.max_length
        )
        # From the padded length, so that few programs serve all batches.
        longest_target = max(1, int(np.ceil(length_factor * source.shape[1])) + extra_length)
        cache_length = bucket_length(longest_target, CACHE_LENGTH_MULTIPLE, limit)
        max_lengths = np.ceil(length_factor * lengths).astype(np.int32) + extra_length
        max_lengths = np.clip(max_lengths, 1, cache_length)
        max_lengths[len(batch) :] = 1  # missing rows
        found = _search(
            prepared,
            source,
            lengths,
            max_lengths,
            start_token,
            first_token,
            stop_tokens,
            model=model,
            config=beam_search_config,
            cache_length=cache_length,
        )
        hypotheses, hypothesis_scores = jax.device_get(found)
        for row, index in enumerate(batch):
            best = hypotheses[row, 0]
            tokens[index] = best[best != NO_TOKEN].tolist()
            scores[index] = float(hypothesis_scores[row, 0])
    return TranslateOutput(tokens, scores)


@functools.partial(jax.jit, static_argnames=("model", "config", "cache_length"))
def _search(
    params: Params,
    source: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    max_lengths: Int[Array, "B"],
    start_token: jax.Array,
    first_token: jax.Array | None,
    stop_tokens: Int[Array, "E"],
    *,
    model: EncoderDecoder,
    config: BeamSearchConfig,
    cache_length: int,
) -> Hypotheses:
    """Encode a batch of padded sources and search translations."""
    batch, size = source.shape
    segments = segments_of_lengths(lengths, size)
    variables = {"params": params}
    first = jnp.full((batch, 1), start_token, jnp.int32)
    start = model.apply(
        variables,
        source,
        first,
        source_segments=segments,
        positions=jnp.zeros((batch, 1), jnp.int32),
        cache=model.init_cache(batch, cache_length, size),
        outputs=LOGITS,
    )
    beam_segments = jnp.repeat(segments, config.num_beams, axis=0)

    def decode_step(
        cache: Any, tokens: jax.Array, positions: jax.Array
    ) -> tuple[Any, Float[Array, "B V"]]:
        output = model.apply(
            variables,
            None,
            tokens[:, None],
            source_segments=beam_segments,
            positions=positions[:, None],
            cache=cache,
            outputs=LOGITS,
        )
        assert output.logits is not None
        return output.cache, output.logits[:, 0]

    assert start.logits is not None
    logits = start.logits[:, 0]
    if first_token is not None:
        is_first = jnp.arange(logits.shape[-1]) == first_token
        logits = jnp.where(is_first, jnp.zeros_like(logits), MIN_LOG_PROB)
    found = beam_search(
        decode_step,
        start.cache,
        logits,
        jnp.ones(batch, jnp.int32),
        max_lengths,
        stop_tokens,
        config=config,
        max_new_tokens=cache_length,
    )
    hypotheses: Hypotheses = replicate(model.constrain, found)
    return hypotheses

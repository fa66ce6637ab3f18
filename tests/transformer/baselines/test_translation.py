"""Recurrent encoder-decoders as whole models: decoding step by step, and beam search."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, random_params_like
from transformer import BlockConfig, EncoderConfig, EncoderDecoder, MixerConfig, TransformerConfig
from transformer.baselines.baseline_configs import (
    BahdanauConfig,
    LSTMConfig,
    LuongConfig,
    Seq2SeqConfig,
)
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate

B, S, T, V, D = 3, 7, 5, 13, 6
RANDOM = np.random.default_rng(0)
SOURCE: Any = RANDOM.integers(0, V, (B, S))
TOKENS: Any = RANDOM.integers(0, V, (B, T))
SOURCE_SEGMENTS: Any = (np.arange(S)[None] < np.array([[S], [4], [1]])).astype(np.int32)
PLAIN = BlockConfig(mixer=LSTMConfig(), feed_forward=None, norm=None, residual=False)
BIDIRECTIONAL = dataclasses.replace(PLAIN, mixer=LSTMConfig(bidirectional=True))


def make_model(mixer: MixerConfig) -> tuple[EncoderDecoder, Any, Any]:
    """Return a model with a bidirectional encoder layer, and an LSTM under the layer that reads the
    memory.
    """
    config = TransformerConfig(
        vocab_size=V,
        pad_vocab_to_multiple=1,
        d_model=D,
        num_layers=2,
        layer_pattern=(PLAIN, dataclasses.replace(PLAIN, mixer=mixer)),
        final_norm=None,
        encoder=EncoderConfig(num_layers=1, layer_pattern=(BIDIRECTIONAL,), final_norm=None),
    )
    model = EncoderDecoder(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    return (
        model,
        jax.jit(model.apply, static_argnames="outputs"),
        {"params": random_params_like(shapes)},
    )


@pytest.mark.sampled("mixer1")
@pytest.mark.parametrize("mixer", [Seq2SeqConfig(), BahdanauConfig(), LuongConfig()])
def test_cached_decoding_matches_full_pass(mixer: MixerConfig) -> None:
    model, run, params = make_model(mixer)
    full = run(params, SOURCE, TOKENS, source_segments=SOURCE_SEGMENTS).logits
    cache = model.init_cache(B, T, S)
    for t in range(T):
        out = run(
            params,
            SOURCE if t == 0 else None,
            TOKENS[:, t : t + 1],
            source_segments=SOURCE_SEGMENTS,
            positions=np.full((B, 1), t),
            cache=cache,
        )
        cache = out.cache
        assert_close(out.logits[:, 0], full[:, t])


@pytest.mark.full
def test_wide_beam_search_is_exact() -> None:
    """Translations have up to three of V tokens and there is a beam for every prefix."""
    model, run, params = make_model(LuongConfig())
    stop, begin, limit = 0, 1, 3
    source = SOURCE[1, :4]
    result = translate(
        model,
        params["params"],
        [source],
        start_token=begin,
        stop_token=stop,
        beam_search_config=BeamSearchConfig(num_beams=V * V, length_penalty=0.0),
        extra_length=limit,
        length_factor=0.0,
        batch_size=1,
    )
    words = np.stack(np.meshgrid(*[np.arange(V)] * limit, indexing="ij"), -1).reshape(-1, limit)
    inputs = np.concatenate([np.full((len(words), 1), begin), words[:, :-1]], axis=1)
    logits = run(params, np.broadcast_to(source, (len(words), 4)), inputs).logits
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    best, translation = -np.inf, words[0]
    for row, sentence in enumerate(words):
        length = np.flatnonzero(sentence == stop)[0] + 1 if stop in sentence else limit
        total = log_probs[row, np.arange(length), sentence[:length]].sum()
        if total > best:
            best, translation = total, sentence[:length]
    assert result.tokens[0] == [word for word in translation.tolist() if word != stop]
    assert result.scores[0] == pytest.approx(best, rel=1e-5)

"""Recurrent encoder-decoders as whole models: decoding step by step, and beam search."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, random_params_like
from transformer import BlockConfig, EncoderConfig, EncoderDecoder, MixerConfig, TransformerConfig
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.baselines.recurrent import LSTMConfig

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

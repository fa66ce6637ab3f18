"""GNMT against loops over tokens, and as a whole model."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.baselines import formulas
from tests.transformer.formulas import array, assert_close, normal, random_params_like
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import EncoderDecoder, Mask, MaskPattern
from transformer.baselines.gnmt import GNMTDecoderConfig, GNMTEncoderConfig
from transformer.baselines.model_configs import gnmt_config
from transformer.flops import count_token_flops
from transformer.parameter_counts import count_parameters

B, T, S, D, A, L = 2, 7, 6, 5, 3, 4
SEGMENTS = array([[1, 1, 1, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4]])
MEMORY_SEGMENTS = array([[2, 2, 2, 2, 1, 1], [4, 4, 4, 0, 0, 0]])
DOCUMENTS = ((0, 1), (0, 2), (1, 4))


def test_encoder_is_bidirectional_with_residuals_from_layer_3() -> None:
    mixer, params = make_mixer(GNMTEncoderConfig(L), D)
    x = normal(1, B, T, D)
    y = np.asarray(apply_mixer(mixer, params, x, mask=Mask(segments=SEGMENTS)).y)
    for row, document in DOCUMENTS:
        own = SEGMENTS[row] == document
        assert_close(y[row, own], formulas.gnmt_encoder(x[row, own], params, L))


def test_all_decoder_layers_get_the_attention_context() -> None:
    one = np.zeros((1, 1, D), np.float32)
    mixer, params = make_mixer(GNMTDecoderConfig(L, score_size=A), D, memory=one)
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    mask = Mask(MaskPattern(ordered=False), segments=SEGMENTS, key_segments=MEMORY_SEGMENTS)
    output = apply_mixer(mixer, params, x, frozenset({"weights"}), memory=memory, mask=mask)
    y, weights = np.asarray(output.y), np.zeros((B, 1, T, S))
    for row, document in DOCUMENTS:
        target, source = SEGMENTS[row] == document, MEMORY_SEGMENTS[row] == document
        expected, expected_weights = formulas.gnmt_decoder(
            x[row, target], memory[row, source], params, L
        )
        assert_close(y[row, target], expected)
        weights[row, 0][np.ix_(target, source)] = expected_weights
    assert_close(output.aux["weights"], weights)


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    return EncoderDecoder(gnmt_config(D, num_layers=3, vocab_size=13, pad_vocab_to_multiple=1))


def test_cached_decoding_matches_full_pass(model: EncoderDecoder) -> None:
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    params, run = (
        {"params": random_params_like(shapes)},
        jax.jit(model.apply, static_argnames="outputs"),
    )
    source, tokens = array(np.arange(B * S).reshape(B, S) % 13), array([[3, 1, 4], [1, 5, 9]])
    kwargs: Any = dict(source_segments=array([[1] * S, [1, 1, 0, 0, 0, 0]]))
    full = run(params, source, tokens, **kwargs).logits
    cache = model.init_cache(B, 3, S)
    for t in range(3):
        kwargs |= dict(positions=np.full((B, 1), t), cache=cache)
        out = run(params, source if t == 0 else None, tokens[:, t : t + 1], **kwargs)
        cache = out.cache
        assert_close(out.logits[:, 0], full[:, t])


def test_published_parameter_count() -> None:
    """Eight layers of 1,024 on each side, and a vocabulary of 32,000 subwords."""
    config = gnmt_config(vocab_size=32_000)
    assert config.encoder is not None
    encoder = config.encoder.layer_pattern[0].mixer
    assert isinstance(encoder, GNMTEncoderConfig)
    assert (encoder.num_layers, encoder.dropout) == (8, 0.2)
    lstm = lambda inputs: 4 * 1024 * (inputs + 1024 + 1)  # noqa: E731
    encoding = 2 * lstm(1024) + lstm(2048) + 6 * lstm(1024)
    score = 2 * 1024**2 + 1024
    decoding = 8 * lstm(2048) + score
    counted = count_parameters(EncoderDecoder(config))
    assert counted.total == encoding + decoding + 2 * 32_000 * 1024


def test_flops(model: EncoderDecoder) -> None:
    flops = count_token_flops(model, 23)
    assert flops.scores == flops.scores_causal == 2 * 23 * (D + D)
    assert flops.uncounted == ()

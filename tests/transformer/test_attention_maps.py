"""Attention maps of whole models: weights and hidden pairs, by stage and layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from tests.transformer.mixers import inputs as mixer_inputs
from tests.transformer.mixers import make_context
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    Mask,
    MaskPattern,
    MixerConfig,
    TransformerConfig,
)
from transformer.attention.mixer import mixer_class
from transformer.attention.variants.bigbird import BigBirdConfig
from transformer.attention.variants.performer import PerformerConfig
from transformer.attention.variants.reformer import ReformerConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.attention.variants.sparse_transformer import SparseTransformerConfig
from transformer.attention.variants.top_k import TopKConfig
from transformer.attention_maps import AttentionMap, attention_maps
from transformer.inspection import layer_values
from transformer.testing.mixer_under_test import projections

WIDTH, LENGTH, VOCABULARY = 12, 11, 17
FULL = AttentionConfig(num_heads=3)


def block(mixer: MixerConfig, cross: MixerConfig | None = None) -> BlockConfig:
    return BlockConfig(mixer, cross, FeedForwardConfig(d_ff=7), norm=None)


def config_of(*mixers: MixerConfig, layers: int = 0, **changes: Any) -> TransformerConfig:
    pattern = tuple(
        map(block, mixers)
    )  # without norms, so that a mixer's input is the residual stream
    return TransformerConfig(
        VOCABULARY, WIDTH, layers or len(mixers), layer_pattern=pattern, **changes
    )


def language_model(*mixers: MixerConfig, **changes: Any) -> tuple[LanguageModel, Any, Any]:
    model = LanguageModel(config_of(*mixers, **changes))
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(2, LENGTH)).astype(np.int32)
    return model, make_params(model), tokens


def make_params(model: Any) -> Any:
    return random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))


def test_maps_equal_the_weights_of_the_model() -> None:
    changes: Any = dict(layers=2, layer_loop="scan", remat="full")
    model, params, tokens = language_model(FULL, **changes)
    actual = attention_maps(model, params, tokens=tokens)
    run = jax.jit(functools.partial(model.apply, outputs={"weights"}))
    expected = layer_values(run({"params": params}, tokens), "weights")
    assert [(each.stage, each.layer, each.mixer) for each in actual] == [
        ("decoder", layer, "full") for layer in range(2)
    ]
    for each, weights in zip(actual, expected, strict=True):
        np.testing.assert_allclose(each.weights, weights, atol=1e-6)
        assert np.array_equal(each.visible[0, 0], np.tri(LENGTH, dtype=bool))


def test_each_layer_has_its_own_pattern() -> None:
    window, performer = SlidingWindowConfig(num_heads=3, window=4), PerformerConfig(num_heads=3)
    model, params, tokens = language_model(window, performer, FULL)
    first, last = attention_maps(model, params, tokens=tokens)
    assert (first.layer, first.mixer, last.layer, last.mixer) == (0, "sliding_window", 2, "full")
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    assert np.array_equal(first.visible[0, 0], (distance >= 0) & (distance < 4))
    assert np.asarray(last.visible)[0, 0].sum() == LENGTH * (LENGTH + 1) // 2


SPARSE: list[MixerConfig] = [
    BigBirdConfig(num_heads=3, num_kv_heads=1, block_size=2, num_random_blocks=1),
    SparseTransformerConfig(num_heads=3, stride=3),
    ReformerConfig(num_heads=3, num_buckets=2, window=3),
    TopKConfig(num_heads=3, keys_per_query=2),
]


@pytest.mark.sampled("bigbird", "top_k")
@pytest.mark.parametrize("mixer", SPARSE, ids=lambda mixer: mixer.kind)
def test_weights_reproduce_the_layer_output(mixer: MixerConfig) -> None:
    model, params, tokens = language_model(mixer)
    [found] = attention_maps(model, params, tokens=tokens)
    weights, visible = np.asarray(found.weights), np.asarray(found.visible)
    names = frozenset({"residual_pre", "mixer_output"})
    output = jax.jit(lambda params: model.apply({"params": params}, tokens, outputs=names))(params)
    seen = {name: layer_values(output, name)[0] for name in names}
    own = jax.tree.map(lambda leaf: leaf[0], params["layers"]["place_0"])
    x = seen["residual_pre"]
    alone = mixer_class(mixer)(mixer, make_context(WIDTH), parent=None)
    causal = mixer_inputs(LENGTH, mask=_causal(), constants=alone.constants(mixer, 0, WIDTH))
    heads = jax.jit(lambda params, x: projections(alone, params, x, causal))(own["mixer"], x)
    v = np.repeat(np.asarray(heads[2]), 3 // heads[2].shape[2], axis=2)
    y = np.einsum("BNTS,BSNH,NHD->BTD", weights, v, own["mixer"]["output"])
    y = y + np.asarray(own["mixer"].get("output_bias", 0))
    np.testing.assert_allclose(y, seen["mixer_output"], atol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not weights[~np.broadcast_to(visible, weights.shape)].any()
    assert visible.mean() < 0.5


def _causal() -> Mask:
    return Mask(MaskPattern(causal=True), positions=jnp.arange(LENGTH)[None])


@pytest.mark.full
def test_stages_of_an_encoder_decoder() -> None:
    pattern = (block(FULL, AttentionConfig(num_heads=2)),)
    encoder = EncoderConfig(num_layers=3, layer_pattern=(block(FULL),))
    config = dataclasses.replace(config_of(FULL, layers=2), layer_pattern=pattern, encoder=encoder)
    model = EncoderDecoder(config)
    params = make_params(model)
    source, target = (np.arange(n, dtype=np.int32)[None] for n in (7, 5))
    segments = np.array([[1, 1, 1, 1, 1, 1, 0]])
    inputs: Any = dict(source=source, tokens=target, source_segments=segments)
    actual = attention_maps(model, params, **inputs)
    places = [(each.stage, each.layer) for each in actual]
    decoder: list[Any] = [("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert places == [("encoder", layer) for layer in range(3)] + decoder
    by_place: dict[Any, AttentionMap] = dict(zip(places, actual, strict=True))
    assert by_place["encoder", 2].weights.shape == (1, 3, 7, 7)
    cross = by_place["cross", 1]
    assert cross.weights.shape == (1, 2, 5, 7)
    assert np.array_equal(cross.visible[0, 0], np.broadcast_to(segments[0] != 0, (5, 7)))
    output = jax.jit(
        lambda params: model.apply({"params": params}, **inputs, outputs=frozenset({"weights"}))
    )(params)
    np.testing.assert_allclose(cross.weights, layer_values(output, "cross_weights")[1], atol=1e-6)


def test_model_without_attention_weights_raises() -> None:
    model, params, tokens = language_model(PerformerConfig(num_heads=3))
    with pytest.raises(ValueError, match="mixer performer: has no attention weights") as error:
        attention_maps(model, params, tokens=tokens)
    assert "\n" not in str(error.value)


def test_maps_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params, tokens = language_model(FULL, layers=2)
    weights = 2 * 2 * 3 * LENGTH**2  # examples, layers and heads
    monkeypatch.setattr("transformer.attention_maps.MAX_WEIGHTS", weights)
    assert len(attention_maps(model, params, tokens=tokens)) == 2
    monkeypatch.setattr("transformer.attention_maps.MAX_WEIGHTS", weights // 4)
    with pytest.raises(ValueError, match="1,452 weights, more than 363; shorten the text to 50%"):
        attention_maps(model, params, tokens=tokens)

"""One table of relative positions shared by all layers of an encoder and of a decoder."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    T5RelativeBias,
    TransformerConfig,
)


def make_config(shared: bool, buckets: int = 4) -> TransformerConfig:
    position = T5RelativeBias(buckets, 6, shared=shared)
    mixer = AttentionConfig(num_heads=2, position=position)
    block = BlockConfig(mixer=mixer, feed_forward=None)
    return TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=2,
        layer_pattern=(dataclasses.replace(block, cross_attention=AttentionConfig(num_heads=2)),),
        encoder=EncoderConfig(num_layers=3, layer_pattern=(block,)),
    )


def test_shared_table_equals_equal_tables_with_summed_gradients() -> None:
    shared, separate = (EncoderDecoder(make_config(each)) for each in (True, False))
    params = random_params_like(jax.eval_shape(shared.init_params, jax.random.key(0)))
    tables = {side: params[side]["position_bias"] for side in ("encoder", "decoder")}
    assert {side: table.shape for side, table in tables.items()} == {
        "encoder": (4, 2),
        "decoder": (4, 2),
    }

    def spread(params: Any) -> Any:
        sides = {}
        for side, depth in (("encoder", 3), ("decoder", 2)):
            own = dict(params[side])
            table = own.pop("position_bias")
            place = own["layers"]["place_0"]
            tables = jnp.broadcast_to(table, (depth, *table.shape))
            mixer = place["mixer"] | {"position_bias": tables}
            sides[side] = own | {"layers": {"place_0": place | {"mixer": mixer}}}
        return params | sides

    source, tokens = jnp.arange(7)[None], jnp.arange(5)[None] + 2

    def loss(model: EncoderDecoder, params: Any) -> jax.Array:
        logits = model.apply({"params": params}, source, tokens).logits
        assert logits is not None
        return jnp.square(logits).sum()

    run = jax.jit(jax.value_and_grad(lambda each: loss(shared, each)))
    run_separate = jax.jit(jax.value_and_grad(lambda each: loss(separate, spread(each))))
    (value, actual), (expected_value, expected) = run(params), run_separate(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for side in ("encoder", "decoder"):
        table, reference = (np.asarray(each[side]["position_bias"]) for each in (actual, expected))
        assert np.abs(table - reference).max() < 1e-5 * np.abs(reference).max()
        assert np.abs(table).max() > 0


def test_language_model_with_a_shared_table_decodes_from_a_cache() -> None:
    block = dataclasses.replace(make_config(True).layer_pattern[0], cross_attention=None)
    config = dataclasses.replace(make_config(True), encoder=None, layer_pattern=(block,))
    model = LanguageModel(config)
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    assert params["position_bias"].shape == (4, 2)
    tokens = jnp.arange(7)[None]
    full = model.apply({"params": params}, tokens).logits
    cache, positions = model.init_cache(1, 7), jnp.arange(7)[None]
    for part in (slice(0, 5), slice(5, 7)):
        output = model.apply(
            {"params": params}, tokens[:, part], positions=positions[:, part], cache=cache
        )
        cache = output.cache
        assert full is not None
        assert output.logits is not None
        np.testing.assert_allclose(output.logits, full[:, part], rtol=1e-4, atol=1e-5)
    changed = params | {"position_bias": params["position_bias"] + jnp.eye(4, 2)}
    assert np.abs(np.asarray(model.apply({"params": changed}, tokens).logits) - full).max() > 0.01


def test_shared_bias_of_several_shapes_raises() -> None:
    config = make_config(True)
    other = make_config(True, buckets=6).layer_pattern[0]
    mixed = dataclasses.replace(config, layer_pattern=(config.layer_pattern[0], other))
    with pytest.raises(ValueError, match="the layers have different buckets or heads"):
        jax.eval_shape(EncoderDecoder(mixed).init_params, jax.random.key(0))

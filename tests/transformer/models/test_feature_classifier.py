"""The classifier of continuous inputs: against NumPy, and attention along the edges of a graph."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeatureClassifier,
    LearnedPositions,
    NoPosition,
    TransformerConfig,
)

B, T, NUM_FEATURES, NUM_CLASSES = 2, 5, 3, 7

CONFIG = TransformerConfig(
    vocab_size=1,
    d_model=8,
    num_layers=2,
    layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=2)),),
    causal=False,
    position_embedding=LearnedPositions(T),
)


def model_and_params(config: TransformerConfig = CONFIG, **settings: Any) -> tuple[Any, Any]:
    model = FeatureClassifier(
        config, num_features=NUM_FEATURES, num_classes=NUM_CLASSES, **settings
    )
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    return model, jax.tree.map(jnp.asarray, params)


FEATURES = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, NUM_FEATURES)), jnp.float32)


def test_input_and_head_match_numpy() -> None:
    """With zeroed layers: a matrix, positions, pooling and the head."""
    config = dataclasses.replace(CONFIG, final_norm=None)
    for pooling in ("mean", "max", "first"):
        model, params = model_and_params(config, pooling=pooling)
        params["layers"] = jax.tree.map(jnp.zeros_like, params["layers"])
        plain = jax.tree.map(np.asarray, params)
        x = np.asarray(FEATURES) @ plain["input"] + plain["input_bias"] + plain["positions"]
        pooled = {"mean": x.mean(axis=1), "max": x.max(axis=1), "first": x[:, 0]}[pooling]
        expected = pooled @ plain["head"] + plain["head_bias"]
        output = jax.jit(model.apply)({"params": params}, FEATURES)
        np.testing.assert_allclose(output.logits, expected, atol=1e-5)
        np.testing.assert_allclose(output.hidden, x, atol=1e-5)


def test_receptive_field_grows_by_one_edge_per_layer() -> None:
    """On a path graph, two layers reach two edges: changes farther away have no effect."""
    config = dataclasses.replace(CONFIG, position_embedding=NoPosition())
    model, params = model_and_params(config, pooling="first")
    path = np.abs(np.subtract.outer(np.arange(T), np.arange(T))) <= 1
    adjacency = jnp.asarray(np.broadcast_to(path, (1, T, T)))
    apply = jax.jit(lambda x: model.apply({"params": params}, x, adjacency=adjacency).logits)
    before = apply(FEATURES)
    for node in range(T):
        changed = apply(FEATURES.at[:, node].add(1.0))
        assert np.array_equal(changed, before) == (node > 2), node


def test_padding_does_not_change_the_output() -> None:
    model, params = model_and_params()
    segments = jnp.asarray(np.arange(T)[None] < np.array([[T], [3]]), jnp.int32)
    apply = jax.jit(lambda x, s: model.apply({"params": params}, x, segments=s).logits)
    output = apply(FEATURES, segments)
    changed = apply(FEATURES.at[1, 3:].set(9.0), segments)
    np.testing.assert_array_equal(output, changed)
    short = apply(FEATURES[1:, :3], jnp.ones((1, 3), jnp.int32))
    np.testing.assert_allclose(output[1:], short, atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
def test_dropout_acts_only_with_rngs() -> None:
    config = dataclasses.replace(CONFIG, embedding_dropout=0.5)
    model, params = model_and_params(config, head_dropout=0.5)
    rngs = jax.random.split(jax.random.key(3), B)
    apply = jax.jit(lambda rngs: model.apply({"params": params}, FEATURES, dropout_rngs=rngs))
    assert np.array_equal(apply(rngs).logits, apply(rngs).logits)
    assert not np.allclose(apply(rngs).logits, apply(None).logits)
    of_flax = jax.jit(lambda key: model.apply({"params": params}, FEATURES, rngs={"dropout": key}))
    assert not np.allclose(of_flax(jax.random.key(3)).logits, apply(None).logits)
    with pytest.raises(ValueError, match="has to be one typed key for each of the 2 examples"):
        apply(jax.random.PRNGKey(3)[None])


def test_head_outputs_are_returned() -> None:
    model, params = model_and_params()
    output = jax.jit(functools.partial(model.apply, outputs=frozenset({"head_outputs"})))
    [values] = output({"params": params}, FEATURES).aux
    assert values["head_outputs"].shape == (2, B, T, 2, 4)
    assert np.abs(values["head_outputs"]).max() > 0


@pytest.mark.usefixtures("unchecked_shapes")
def test_invalid_inputs_raise() -> None:
    model, params = model_and_params()
    apply = lambda *x, **y: jax.eval_shape(  # noqa: E731
        lambda: model.apply({"params": params}, *x, **y)
    )
    for position in (-2, T):
        positions = jnp.arange(T)[None].at[0, 1].set(position)
        with pytest.raises(ValueError, match=f"position {position}: "):
            apply(FEATURES, positions=positions)
    apply(FEATURES, positions=jnp.array([[0, 1, 2, 3, -1]]))  # -1: padding
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (FEATURES[..., :2], {}, "features"),
        (jnp.zeros((1, 6, NUM_FEATURES)), {}, "6 inputs: the table of learned positions has 5"),
        (FEATURES, {"outputs": frozenset({"head_output"})}, "outputs 'head_output'"),
        (FEATURES, {"adjacency": jnp.ones((B, T, T))}, "adjacency"),
    )
    for features, given, message in cases:
        with pytest.raises(ValueError, match=message):
            apply(features, **given)
    with pytest.raises(ValueError, match="pooling first: the first token of a causal model sees"):
        FeatureClassifier(dataclasses.replace(CONFIG, causal=True), pooling="first")
    with pytest.raises(ValueError, match="num_features 0: give 1 or more"):
        FeatureClassifier(CONFIG, num_features=0)

"""LoRA: NumPy's formulas, equality with merged weights, and the trainable parts of a model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, normal, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    MoEConfig,
    RoPE,
    TransformerConfig,
)
from transformer.attention.variants.longformer import LongformerConfig
from transformer.layers.basic import apply_matrix
from transformer.layers.low_rank import LowRankWeight, merge_weights
from transformer.lora import LoRALayout

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=6, position=RoPE())
GATED = FeedForwardConfig(d_ff=14, gated=True)
MIXTURE = MoEConfig(num_experts=3, num_experts_per_token=2, expert=GATED)
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def make_model(*blocks: BlockConfig, **changes: Any) -> LanguageModel:
    pattern = blocks or (BlockConfig(ATTENTION, feed_forward=GATED),)
    settings: dict[str, Any] = {"d_model": 10, "num_layers": 3, "vocab_size": 17} | changes
    return LanguageModel(TransformerConfig(layer_pattern=pattern, **settings))


def make_parts(model: LanguageModel, **options: Any) -> tuple[LoRALayout, Any, Any, Any]:
    """Return the layout, parameters, and trainable and frozen parts, with a B that is not 0."""
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    settings: dict[str, Any] = {"rank": 3, "alpha": 5.0, "targets": ("all",)} | options
    layout = LoRALayout.create(model.logical_axes(), **settings)
    shapes = jax.eval_shape(layout.init, jax.random.key(1), params)
    trainable = random_params_like(shapes, seed=1)
    return layout, params, trainable, layout.freeze(params)


@pytest.mark.parametrize("flatten", [True, False])
def test_matches_formula_and_gradients(flatten: bool) -> None:
    """y = x W + s (x A) B; dA = s x^T (dy B^T), dB = s (x A)^T dy, dx = dy W^T + s dy B^T A^T."""
    x, w, a, b = normal(0, 2, 5, 7), normal(1, 7, 3, 11), normal(2, 7, 2), normal(3, 2, 3, 11)
    dy, scale = normal(4, 2, 5, 3, 11), 2.5

    def apply(x: Any, a: Any, b: Any) -> Any:
        return apply_matrix(x, LowRankWeight(w, a, b, scale), 1, flatten)

    @jax.jit
    def value_and_gradients(x: Any, a: Any, b: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(apply, x, a, b)
        return y, vjp(dy)

    y, (dx, da, db) = value_and_gradients(x, a, b, dy)
    flat_b = b.reshape(2, 33)
    assert_close(y, (x @ w.reshape(7, 33) + scale * (x @ a) @ flat_b).reshape(2, 5, 3, 11))
    rows, drows = x.reshape(10, 7), dy.reshape(10, 33)
    assert_close(da, scale * rows.T @ (drows @ flat_b.T))
    assert_close(db, scale * ((rows @ a).T @ drows).reshape(b.shape))
    assert_close(dx, (drows @ (w.reshape(7, 33) + scale * a @ flat_b).T).reshape(x.shape))


def test_merged_stack_is_base_plus_update() -> None:
    w, a, b = normal(0, 3, 5, 7, 2), normal(1, 3, 5, 7, 4), normal(2, 3, 4, 2)
    weight = LowRankWeight(w, a, b, 0.5)
    assert_close(jax.jit(lambda: weight.merge())(), w + 0.5 * np.einsum("LNHr,LrD->LNHD", a, b))


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(make_model(layer_loop="scan"), id="scan"),
        pytest.param(make_model(layer_loop="scan", remat="full"), id="remat"),
        pytest.param(make_model(BlockConfig(ATTENTION, feed_forward=MIXTURE)), id="experts"),
        pytest.param(
            make_model(
                BlockConfig(
                    ATTENTION, feed_forward=dataclasses.replace(MIXTURE, capacity_factor=2.0)
                ),
                BlockConfig(ATTENTION, feed_forward=GATED),
                causal=False,
            ),
            id="capacity",
        ),
    ],
)
def test_logits_and_gradients_match_merged_weights(model: LanguageModel) -> None:
    layout, _, trainable, frozen = make_parts(model)

    def logits(trainable: Any, merged: bool) -> Any:
        params = layout.combine(trainable, frozen)
        params = merge_weights(params) if merged else params
        return model.apply({"params": params}, TOKENS).logits

    weights = normal(9, *TOKENS.shape, 17)
    results = []
    for merged in (False, True):
        objective = lambda t, merged=merged: jnp.sum(logits(t, merged) * weights)  # noqa: E731
        results.append(jax.jit(jax.value_and_grad(objective))(trainable))
    (loss, grads), (expected_loss, expected_grads) = results
    assert_close(loss, expected_loss)
    jax.tree.map(assert_close, grads, expected_grads)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(grads)))


@pytest.mark.full
def test_global_tokens_with_absorbed_projections() -> None:
    """Longformer multiplies key and value matrices into a few queries."""
    model = make_model(
        BlockConfig(LongformerConfig(num_heads=2, one_sided_window=2), feed_forward=GATED),
        causal=False,
    )
    layout, _, trainable, frozen = make_parts(model)
    params = layout.combine(trainable, frozen)
    actual, expected = (
        model.apply({"params": each}, TOKENS).logits for each in (params, merge_weights(params))
    )
    assert_close(actual, expected)


@pytest.mark.full
def test_initial_adapter_changes_nothing() -> None:
    model = make_model()
    layout, params, _, frozen = make_parts(model)
    trainable = layout.init(jax.random.key(1), params)
    combined = layout.combine(trainable, frozen)
    expected = model.apply({"params": params}, TOKENS).logits
    np.testing.assert_array_equal(model.apply({"params": combined}, TOKENS).logits, expected)
    jax.tree.map(np.testing.assert_array_equal, merge_weights(combined), params)
    assert jnp.std(trainable["layers"]["place_0"]["mixer"]["query"]["lora_a"]) > 0


def test_trainable_tree_has_names_and_axes() -> None:
    model = make_model(tie_embeddings=False)
    layout, params, trainable, frozen = make_parts(
        model, targets=("query", "output"), trained=("final_norm", "output")
    )
    factors = trainable["layers"]["place_0"]["mixer"]["output"]
    assert factors["lora_a"].shape == (3, 2, 6, 3)
    assert factors["lora_b"].shape == (3, 3, 10)
    assert set(trainable) == {"layers", "final_norm", "output"}
    assert "output" not in frozen
    axes = layout.trainable_axes()["layers"]["place_0"]["mixer"]["query"]
    assert axes["lora_a"].names == ("layers", "embed", "lora_rank")
    assert axes["lora_b"].names == ("layers", "lora_rank", "heads", "head")
    # The axes have the structure of the trees that they describe.
    for tree, its_axes in ((trainable, layout.trainable_axes()), (frozen, layout.frozen_axes())):
        jax.tree.map(lambda leaf, axes: axes.names, tree, its_axes)
    np.testing.assert_array_equal(
        layout.replace_trained(trainable, params)["output"], params["output"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("qeury",)}, "targets qeury: .* query, key, value, output, gate, up, down"),
        ({"trained": ("heda",)}, "trained heda: .* embedding"),
    ],
)
def test_unknown_target_names_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRALayout.create(make_model().logical_axes(), rank=2, **options)

"""Small weights: NumPy's formulas, equality with dequantized weights, and memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, assert_trees_close, normal
from tests.transformer.test_lora import (
    ATTENTION,
    GATED,
    MIXTURE,
    TOKENS,
    make_model,
    make_parts,
)
from transformer import BlockConfig
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.layers.basic import apply_matrix
from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.low_rank import LowRankWeight, merge_weights
from transformer.layers.quantized import FP4_VALUES, QuantizedWeight, quantize_weight
from transformer.models.unstacked import unstack_for_decoding
from transformer.quantization import quantize_weights

STACKED = LogicalAxes(("layers",), ("heads", "head"), ("embed",))


def test_int8_is_the_nearest_multiple_of_the_scale_of_its_output() -> None:
    w = normal(0, 2, 3, 5, 7)  # [L, N, H, D]
    scales = np.abs(w).max((1, 2), keepdims=True) / 127
    weight = quantize_weight(jnp.asarray(w), STACKED, bits=8)
    assert weight.codes.shape == (2, 15, 7)
    assert weight.scales.shape == (2, 1, 7)
    assert_close(jax.jit(weight.dequantize)(), np.round(w / scales) * scales)


def test_int4_divides_the_range_of_each_group() -> None:
    w = normal(0, 2, 3, 4, 7)
    w[:, 0] = np.abs(w[:, 0])  # a group without negative entries: 0 is in its range, too
    w[1, 2] = 0
    weight = quantize_weight(jnp.asarray(w), STACKED, bits=4, group_size=4)
    groups = w.reshape(2, 3, 4, 7)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    dequantized = np.asarray(jax.jit(weight.dequantize)()).reshape(groups.shape)
    step = np.asarray((high - low) / 15)[:, :, None]
    # Half a step by rounding, and as much by the zero point, which is rounded too.
    assert np.all(np.abs(dequantized - groups) <= step * 1.01)
    assert np.abs(dequantized - groups).mean() < 0.3 * step.mean()
    np.testing.assert_array_equal(dequantized[1, 2], 0)
    assert weight.codes.dtype == jnp.uint8
    assert weight.codes.shape == (2, 6, 7)


def test_groups_must_divide_the_inputs() -> None:
    with pytest.raises(ValueError, match="group_size 8: does not divide the 12 inputs"):
        quantize_weight(jnp.ones((12, 5)), LogicalAxes((), ("a",), ("b",)), bits=4, group_size=8)


def test_fp4_and_permuted_groups_follow_their_formulas() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4, 3), np.uint8)
    nibbles = np.stack([codes & 15, codes >> 4], 1).reshape(8, 3)
    exponents = rng.integers(100, 140, (2, 3), np.uint8)
    weight = QuantizedWeight(
        jnp.asarray(codes), jnp.asarray(exponents), None, None, (8,), 1, "float32"
    )
    powers = 2.0 ** (exponents.astype(int) - 127)
    expected = np.array(FP4_VALUES)[nibbles] * np.repeat(powers, 4, axis=0)
    np.testing.assert_array_equal(weight.dequantize(), expected.astype(np.float32))
    scales, zeros = normal(1, 2, 3), rng.integers(0, 16, (2, 3), np.uint8)
    index = np.array([0, 1, 1, 0, 0, 1, 0, 1], np.int32)
    parts = [jnp.asarray(each) for each in (codes, scales, zeros, index)]
    weight = QuantizedWeight(parts[0], parts[1], parts[2], parts[3], (8,), 1, "float32")
    expected = (nibbles - zeros[index].astype(float)) * scales[index]
    assert_close(weight.dequantize(), expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("flatten", [True, False])
def test_products_are_those_of_the_dequantized_matrix(bits: int, flatten: bool) -> None:
    axes = LogicalAxes((), ("heads", "head"), ("a", "b"))
    weight = quantize_weight(jnp.asarray(normal(0, 4, 8, 3, 5)), axes, bits=bits, group_size=16)
    x, dy = normal(1, 2, 7, 4, 8), normal(2, 2, 7, 3, 5)
    run = jax.jit(lambda x, w: jax.vjp(lambda x: apply_matrix(x, w, 2, flatten), x))
    y, vjp = run(x, weight)
    matrix = np.asarray(weight.dequantize())
    assert_close(y, np.einsum("BTNH,NHab->BTab", x, matrix))
    assert_close(vjp(dy)[0], np.einsum("BTab,NHab->BTNH", dy, matrix))


def test_sums_of_codes_do_not_overflow_float16() -> None:
    axes = LogicalAxes((), ("a",), ("b",))
    weight = quantize_weight(jnp.full((1024, 2), 0.01), axes, bits=8).astype(jnp.float16)
    y = apply_matrix(jnp.ones((1, 1, 1024), jnp.float16), weight, 1, False)
    assert_close(y, np.full((1, 1, 2), 10.24), 1e-3)


WIDE = dict(d_model=32, vocab_size=17)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layer_loop": "scan"}, id="scan"),
        pytest.param({"layer_loop": "unroll", "remat": "full"}, id="remat"),
        pytest.param({"pattern": MIXTURE}, id="experts"),
        pytest.param({"pattern": dataclasses.replace(MIXTURE, dispatcher="sorted")}, id="sorted"),
    ],
)
def test_logits_and_gradients_match_dequantized_weights(kind: Any, changes: Any) -> None:
    """The gradients are those of LoRA over a quantized base."""
    changes = dict(changes)
    feed_forward = changes.pop("pattern", GATED)
    model = make_model(BlockConfig(ATTENTION, feed_forward=feed_forward), **WIDE, **changes)
    layout, _, trainable, frozen = make_parts(model)
    frozen = quantize_weights(frozen, model.logical_axes(), kind)
    expected = merge_weights(frozen)
    weights = normal(9, *TOKENS.shape, 17)

    def loss(trainable: Any, frozen: Any) -> Any:
        params = layout.combine(trainable, frozen)
        return jnp.sum(model.apply({"params": params}, TOKENS).logits * weights)

    run = jax.jit(jax.value_and_grad(loss))
    assert_trees_close(run(trainable, frozen), run(trainable, expected), 1e-4)


def test_update_is_merged_into_the_dequantized_base() -> None:
    base = quantize_weight(jnp.asarray(normal(0, 3, 4, 8, 2)), STACKED, bits=4, group_size=16)
    a, b = normal(1, 3, 4, 8, 4), normal(2, 3, 4, 2)
    merged = LowRankWeight(base, jnp.asarray(a), jnp.asarray(b), 0.5).merge()
    update = 0.5 * np.einsum("LNHr,LrD->LNHD", a, b)
    assert_close(merged, np.asarray(base.dequantize()) + update)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decoding_continues_as_the_dequantized_model(kind: Any) -> None:
    model = make_model(BlockConfig(ATTENTION, feed_forward=GATED), **WIDE)
    params = make_parts(model)[1]
    params = quantize_weights(params, model.logical_axes(), kind)

    def tokens(params: Any) -> Any:
        return generate(
            model, params, [[1, 2, 3], [4]], max_new_tokens=6, sampling=SamplingConfig(0.0)
        )

    expected = tokens(merge_weights(params))
    assert tokens(params) == tokens(unstack_for_decoding(params)) == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_one_matrix_at_a_time_is_in_floats(kind: Any) -> None:
    """XLA would dequantize all layers before the first one runs, and keep them for the gradient."""
    model = make_model(
        BlockConfig(ATTENTION, feed_forward=dataclasses.replace(GATED, d_ff=512)),
        d_model=128,
        num_layers=6,
        layer_loop="unroll",
    )
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    layout, tokens = make_parts(model)[0], jnp.zeros((1, 8), jnp.int32)
    shapes = quantize_weights(params, model.logical_axes(), kind)
    trainable = jax.eval_shape(layout.init, jax.random.key(1), params)

    def loss(trainable: Any, frozen: Any) -> Any:
        combined, keys = layout.combine(trainable, frozen), jax.random.split(jax.random.key(0), 1)
        logits: Any = model.apply({"params": combined}, tokens, dropout_rngs=keys).logits
        return jnp.sum(logits)

    def temporary_bytes(program: Any, *args: Any) -> int:
        analysis: Any = jax.jit(program).lower(*args).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    largest, layers = 128 * 512 * 4, 6 * 3 * 128 * 512 * 4
    forward = temporary_bytes(lambda p: model.apply({"params": p}, tokens).logits, shapes)
    assert forward < 2.5 * largest
    backward = temporary_bytes(jax.grad(loss), trainable, layout.freeze(shapes))
    assert backward < layers / 2

"""Blockwise attention and query blocks equal the reference, for every mask and score."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, assert_trees_close, normal
from tests.transformer.mixers import value_and_gradients
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.partial import add_sinks, merge_partials
from transformer.attention.masks import dense_mask
from transformer.attention.position_bias import (
    RelativeTables,
    T5RelativeBias,
    alibi_bias,
    t5_relative_bias,
)
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.attention.scores import additive_scores
from transformer.testing.mixer_under_test import reference_softmax_attention

B, N, K, H, VALUES = 2, 6, 3, 11, 13


def inputs(queries: int, keys: int, kv_heads: int = K) -> tuple[Any, Any, Any]:
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, kv_heads, H),
        normal(2, B, keys, kv_heads, VALUES),
    )


def documents(length: int) -> Any:  # [B, T]
    """Return segments of a few documents per row; the first row ends with padding."""
    starts = np.array([[0.2, 0.3, 0.9], [0.5, 0.7, 1.0]]) * length
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


def random_pairs(queries: int, keys: int) -> Any:  # [B, T, S]
    return np.random.default_rng(0).random((B, queries, keys)) < 0.2


MASKS: dict[str, Any] = {
    "all": lambda t, s: Mask(),
    "causal": lambda t, s: Mask(MaskPattern(causal=True)),
    "segments": lambda t, s: Mask(MaskPattern(causal=True), segments=documents(t)),
    # The first query of a tile of 16 sees one key of the tile but one before it.
    "window": lambda t, s: Mask(MaskPattern(causal=True, window=18)),
    "window both ways": lambda t, s: Mask(MaskPattern(window=5, dilation=3)),
    "lengths": lambda t, s: Mask(key_lengths=array([s, 17])),
    "globals": lambda t, s: Mask(
        MaskPattern(causal=True, window=5), global_positions=array([[3, 70]])
    ),
    "an array": lambda t, s: Mask(allowed=random_pairs(t, s)),
    "a prefix": lambda t, s: Mask(
        MaskPattern(causal=True, prefix=True),
        prefix_lengths=array([t - 3, 0]),
        segments=documents(t),
    ),
    "tokens in another order": lambda t, s: Mask(
        MaskPattern(causal=True, ordered=False), positions=array([np.arange(t)[::-1]])
    ),
}


SCORE_SPECS: dict[str, Callable[[Any], ScoreSpec]] = {
    "plain": lambda extra: ScoreSpec(0.3),
    "capped": lambda extra: ScoreSpec(3.0, soft_cap=2.0),
    "slopes": lambda extra: ScoreSpec(0.3, bias=functools.partial(alibi_bias, N)),
    "buckets": lambda extra: ScoreSpec(
        0.3, bias=functools.partial(t5_relative_bias, extra[:8], T5RelativeBias(num_buckets=8))
    ),
    "tables": lambda extra: ScoreSpec(
        0.3, relative_tables=RelativeTables(normal(5, 5, H), normal(6, 5, VALUES))
    ),
    "an MLP": lambda extra: ScoreSpec(
        0.3, score_fn=functools.partial(additive_scores, extra.T[:, :H])
    ),
}
"""Scores, some with weights of their own in `extra` [16, N]."""


@pytest.mark.sampled(
    "blocks-131-131-segments-3-plain", "257", "67-segments-3-buckets", "67-window-1"
)
@pytest.mark.parametrize(
    ("backend", "queries", "keys", "masks", "kv_heads", "scores"),
    [
        ("query_blocks", 131, 131, "causal", N, "plain"),
        ("query_blocks", 131, 131, "segments", K, "plain"),
        ("query_blocks", 131, 131, "window", 1, "plain"),
        ("query_blocks", 257, 257, "globals", K, "an MLP"),
        ("query_blocks", 131, 131, "an array", K, "plain"),
        ("query_blocks", 131, 131, "segments", K, "slopes"),
        ("query_blocks", 131, 131, "segments", K, "tables"),
        ("blockwise", 67, 67, "causal", N, "plain"),
        ("blockwise", 64, 64, "all", K, "plain"),
        ("blockwise", 67, 67, "window", 1, "plain"),
        ("blockwise", 67, 67, "window both ways", K, "plain"),
        ("blockwise", 67, 41, "lengths", K, "plain"),
        ("blockwise", 73, 73, "globals", K, "plain"),
        ("blockwise", 19, 67, "an array", K, "plain"),
        ("blockwise", 67, 67, "a prefix", K, "plain"),
        ("blockwise", 67, 67, "tokens in another order", K, "plain"),
        ("blockwise", 67, 67, "causal", K, "capped"),
        ("blockwise", 67, 67, "segments", K, "slopes"),
        ("blockwise", 67, 67, "segments", K, "buckets"),
        ("blockwise", 67, 67, "segments", K, "an MLP"),
        ("blockwise", 1, 1, "causal", K, "plain"),
    ],
)
def test_matches_reference(
    backend: Any, queries: int, keys: int, masks: str, kv_heads: int, scores: str
) -> None:
    mask, make = MASKS[masks](queries, keys), SCORE_SPECS[scores]
    arrays, extra = inputs(queries, keys, kv_heads), normal(4, 16, N)

    def run(q: Any, k: Any, v: Any, extra: Any) -> Any:
        if backend == "blockwise":
            return attend_blockwise(q, k, v, mask, make(extra), block_size=16).y
        return attend(q, k, v, mask, make(extra), backend=backend, hardware=Hardware()).y

    def reference(q: Any, k: Any, v: Any, extra: Any) -> Any:
        return attend_reference(q, k, v, mask, make(extra))[0]

    actual = value_and_gradients(run, *arrays, extra)
    chex.assert_tree_all_finite(actual)
    assert_trees_close(actual, value_and_gradients(reference, *arrays, extra))


BACKENDS = ("reference", "query_blocks", "blockwise")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_adds_a_key_without_a_value(backend: Any) -> None:
    length, sinks = 131, normal(7, N)
    q, k, v = inputs(length, length, N)
    mask, spec = MASKS["segments"](length, length), ScoreSpec(0.3)
    kwargs: Any = dict(backend=backend, hardware=Hardware(), sink_logits=sinks)
    y = jax.jit(lambda q, k, v: attend(q, k, v, mask, spec, **kwargs).y)(q, k, v)
    visible = np.asarray(dense_mask(mask, length, length))[:, None]
    exp_scores = np.where(visible, np.exp(0.3 * np.einsum("BTNH,BSNH->BNTS", q, k)), 0)
    weights = exp_scores / (exp_scores.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None])
    assert_close(y, np.einsum("BNTS,BSNH->BTNH", weights, v))


def test_query_blocks_leave_a_prefix_to_the_reference() -> None:
    arrays, mask = inputs(131, 131), MASKS["a prefix"](131, 131)
    visible = np.asarray(dense_mask(mask, 131, 131))[:, None]
    assert visible[0, 0, 64, 90]  # later in the same document, inside the prefix
    spec = ScoreSpec(H**-0.5)
    kwargs: Any = dict(backend="query_blocks", hardware=Hardware())
    y = jax.jit(lambda q, k, v: attend(q, k, v, mask, spec, **kwargs).y)(*arrays)
    assert_close(y, reference_softmax_attention(*arrays, visible))


@pytest.mark.full
def test_merged_partials_are_one_softmax() -> None:
    """Attention to disjoint sets of keys, one of them empty, and a sink; one query sees nothing."""
    arrays, sinks = inputs(19, 37), normal(7, N)
    first = np.zeros((B, 37), int)
    first[0, 20:] = first[1, :9] = 1
    segments = jnp.ones((B, 19), int).at[:, 3].set(0)

    def mask(is_key: Any) -> Mask:
        return Mask(segments=segments, key_segments=array(is_key))

    def merged(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        partials = [
            attend_blockwise(q, k, v, mask(is_key), ScoreSpec(0.3), block_size=16)
            for is_key in (0 * first, first, 1 - first)
        ]
        return add_sinks(merge_partials(partials), sinks).y

    def whole(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        return attend_reference(q, k, v, mask(0 * first + 1), ScoreSpec(0.3), sinks)[0]

    actual = value_and_gradients(merged, arrays, sinks)
    chex.assert_tree_all_finite(actual)
    assert_trees_close(actual, value_and_gradients(whole, arrays, sinks))


@pytest.mark.full
def test_backward_pass_drops_the_same_weights() -> None:
    """The gradient with dropout matches finite differences."""
    q, k, v = inputs(19, 23)
    dropout_rngs = jax.random.split(jax.random.key(0), B)
    score_spec = ScoreSpec(0.3, dropout_rate=0.5, dropout_rngs=dropout_rngs)
    cotangent = normal(5, B, 19, N, VALUES)

    @jax.jit
    def total(q: Any, v: Any) -> Any:
        return (attend_blockwise(q, k, v, Mask(), score_spec, block_size=8).y * cotangent).sum()

    gradient_q, gradient_v = jax.jit(jax.grad(total, (0, 1)))(q, v)
    step = normal(6, *v.shape)
    # The output is linear in v, so the difference is exact up to rounding.
    difference = float(total(q, v + step) - total(q, v))
    assert difference == pytest.approx(float((gradient_v * step).sum()), rel=1e-3)
    step = 1e-2 * normal(8, *q.shape)
    difference = float(total(q + step, v) - total(q - step, v))
    assert difference == pytest.approx(2 * float((gradient_q * step).sum()), rel=1e-2)

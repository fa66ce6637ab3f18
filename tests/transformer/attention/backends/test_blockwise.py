"""Blockwise attention equals the reference in values and gradients, for every mask and score."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from transformer import Mask, MaskPattern
from transformer.attention.attend import ScoreSpec, attend_reference
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.tiling import merge_partials
from transformer.attention.position_bias import alibi_bias, t5_relative_bias
from transformer.attention.position_config import T5RelativeBias
from transformer.attention.scores import add_sinks, additive_scores

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
    "window": lambda t, s: Mask(MaskPattern(causal=True, window=7)),
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
    "an MLP": lambda extra: ScoreSpec(
        0.3, score_fn=functools.partial(additive_scores, extra.T[:, :H])
    ),
}
"""Scores, some with weights of their own in `extra` [16, N]."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("queries", "keys", "masks", "kv_heads", "extras"),
    [
        (67, 67, "causal", N, "plain"),
        (64, 64, "all", K, "plain"),
        (67, 67, "segments", K, "plain"),
        (67, 67, "window", 1, "plain"),
        (67, 67, "window both ways", K, "plain"),
        (67, 41, "lengths", K, "plain"),
        (73, 73, "globals", K, "plain"),
        (19, 67, "an array", K, "plain"),
        (67, 67, "a prefix", K, "plain"),
        (67, 67, "tokens in another order", K, "plain"),
        (67, 67, "causal", K, "capped"),
        (67, 67, "segments", K, "slopes"),
        (67, 67, "segments", K, "buckets"),
        (67, 67, "segments", K, "an MLP"),
        (1, 1, "causal", K, "plain"),
    ],
)
def test_matches_reference(queries: int, keys: int, masks: str, kv_heads: int, extras: str) -> None:
    mask, make = MASKS[masks](queries, keys), SCORE_SPECS[extras]
    arrays, extra = inputs(queries, keys, kv_heads), normal(4, 16, N)
    cotangent = normal(3, B, queries, N, VALUES)

    def run(blocks: bool, arrays: Any, extra: Any) -> Any:
        q, k, v = arrays
        score_spec = make(extra)
        if blocks:
            return attend_blockwise(q, k, v, mask, score_spec, block_size=16).y
        return attend_reference(q, k, v, mask, score_spec)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def both(blocks: bool, arrays: Any, extra: Any) -> Any:
        y, vjp_fn = jax.vjp(functools.partial(run, blocks), arrays, extra)
        return y, vjp_fn(cotangent)

    (y, gradients), (expected, expected_gradients) = (
        both(True, arrays, extra),
        both(False, arrays, extra),
    )
    assert_close(y, expected)
    chex.assert_tree_all_finite(gradients)
    assert_trees_close(gradients, expected_gradients)


@pytest.mark.full
def test_merged_partials_are_one_softmax() -> None:
    """Attention to two disjoint sets of keys, merged, and a sink: values and gradients."""
    arrays = inputs(19, 37)
    hidden = np.zeros((B, 37), int)
    hidden[0, 20:] = hidden[1, :9] = 1
    sinks = normal(7, N)

    def merged(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        partials = [
            attend_blockwise(
                q,
                k,
                v,
                Mask(segments=jnp.ones((B, 19), int), key_segments=array(is_key)),
                ScoreSpec(0.3),
                block_size=16,
            )
            for is_key in (hidden, 1 - hidden)
        ]
        return add_sinks(merge_partials(partials), sinks).y

    def whole(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        return attend_reference(q, k, v, Mask(), ScoreSpec(0.3), sinks)[0]

    def both(run: Any) -> tuple[Array, Any]:
        def inner(*given: Any) -> Any:
            y, vjp_fn = jax.vjp(run, *given)
            return y, vjp_fn(jnp.cos(y))

        return jax.jit(inner)(arrays, sinks)

    (y, gradients), (expected, expected_gradients) = both(merged), both(whole)
    assert_close(y, expected)
    assert_trees_close(gradients, expected_gradients)


@pytest.mark.full
def test_partial_without_visible_keys_adds_nothing() -> None:
    q, k, v = inputs(5, 7)
    nothing_visible = Mask(segments=jnp.ones((B, 5), int), key_segments=jnp.zeros((B, 7), int))

    def run(mask: Mask) -> Any:
        return attend_blockwise(q, k, v, mask, ScoreSpec(0.3))

    full, empty = run(Mask()), run(nothing_visible)
    assert not np.any(empty.y)
    assert np.isneginf(empty.lse).all()
    assert_close(merge_partials([full, empty]).y, full.y)
    assert not np.any(merge_partials([empty, empty]).y)


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

"""Attention tile by tile is the reference, in values and gradients, for every mask and score."""

import functools
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
    """Some documents in each row, and padding at the end of the first."""
    starts = np.array([[0.2, 0.3, 0.9], [0.5, 0.7, 1.0]]) * length
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


def some_of(queries: int, keys: int) -> Any:  # [B, T, S]
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
    "an array": lambda t, s: Mask(allowed=some_of(t, s)),
    "a prefix": lambda t, s: Mask(
        MaskPattern(causal=True, prefix=True),
        prefix_lengths=array([t - 3, 0]),
        segments=documents(t),
    ),
    "tokens in another order": lambda t, s: Mask(
        MaskPattern(causal=True, ordered=False), positions=array([np.arange(t)[::-1]])
    ),
}


def plain(positions: Any, extra: Any) -> ScoreSpec:
    return ScoreSpec(0.3)


def capped(positions: Any, extra: Any) -> ScoreSpec:
    return ScoreSpec(3.0, soft_cap=2.0)


def sloped(positions: Any, extra: Any) -> ScoreSpec:
    return ScoreSpec(0.3, bias=functools.partial(alibi_bias, N))


def bucketed(positions: Any, extra: Any) -> ScoreSpec:
    """Bias with trainable parameters."""
    config = T5RelativeBias(num_buckets=8)
    return ScoreSpec(0.3, bias=lambda q, k: t5_relative_bias(extra[:8], config, q, k))


def met(positions: Any, extra: Any) -> ScoreSpec:
    return ScoreSpec(0.3, score_fn=functools.partial(additive_scores, extra.T[:, :H]))


EXTRAS = {"plain": plain, "capped": capped, "slopes": sloped, "buckets": bucketed, "an MLP": met}


@pytest.mark.slow
@pytest.mark.sampled(
    "causal-6-plain",
    "segments-3-plain",
    "window-1-plain",
    "an MLP",
    "1-1-causal",
    "capped",
)
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
def test_values_and_gradients(
    queries: int, keys: int, masks: str, kv_heads: int, extras: str
) -> None:
    mask, make = MASKS[masks](queries, keys), EXTRAS[extras]
    arrays, extra = inputs(queries, keys, kv_heads), normal(4, 16, N)
    if extras == "an MLP":
        extra = normal(4, 16, N)
    pulled = normal(3, B, queries, N, VALUES)

    def run(blocks: bool, arrays: Any, extra: Any) -> Any:
        q, k, v = arrays
        scoring = make(mask.positions, extra)
        if blocks:
            return attend_blockwise(q, k, v, mask, scoring, block_size=16).y
        return attend_reference(q, k, v, mask, scoring)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def both(blocks: bool, arrays: Any, extra: Any) -> Any:
        y, pull = jax.vjp(functools.partial(run, blocks), arrays, extra)
        return y, pull(pulled)

    (y, gradients), (expected, expected_gradients) = (
        both(True, arrays, extra),
        both(False, arrays, extra),
    )
    assert_close(y, expected)
    chex.assert_tree_all_finite(gradients)
    assert_trees_close(gradients, expected_gradients)


@pytest.mark.slow
def test_what_is_merged_is_one_softmax() -> None:
    """Attention to two sets of keys, merged, and a sink: values and gradients."""
    arrays = inputs(19, 37)
    hidden = np.zeros((B, 37), int)
    hidden[0, 20:] = hidden[1, :9] = 1
    sinks = normal(7, N)

    def split(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        parts = [
            attend_blockwise(
                q,
                k,
                v,
                Mask(segments=jnp.ones((B, 19), int), key_segments=array(part)),
                ScoreSpec(0.3),
                block_size=16,
            )
            for part in (hidden, 1 - hidden)
        ]
        return add_sinks(merge_partials(parts), sinks).y

    def whole(arrays: Any, sinks: Any) -> Any:
        q, k, v = arrays
        return attend_reference(q, k, v, Mask(), ScoreSpec(0.3), sinks)[0]

    def both(run: Any) -> tuple[Array, Any]:
        def inner(*given: Any) -> Any:
            y, pull = jax.vjp(run, *given)
            return y, pull(jnp.cos(y))

        return jax.jit(inner)(arrays, sinks)

    (y, gradients), (expected, wanted) = both(split), both(whole)
    assert_close(y, expected)
    assert_trees_close(gradients, wanted)


@pytest.mark.slow
def test_a_part_that_shows_nothing_adds_nothing() -> None:
    q, k, v = inputs(5, 7)
    nothing = Mask(segments=jnp.ones((B, 5), int), key_segments=jnp.zeros((B, 7), int))

    def run(mask: Mask) -> Any:
        return attend_blockwise(q, k, v, mask, ScoreSpec(0.3))

    alone, none = run(Mask()), run(nothing)
    assert not np.any(none.y)
    assert np.isneginf(none.lse).all()
    assert_close(merge_partials([alone, none]).y, alone.y)
    assert not np.any(merge_partials([none, none]).y)


@pytest.mark.slow
def test_dropped_weights_are_dropped_again_in_the_backward_pass() -> None:
    """The gradient is that of the function: it is what finite differences find."""
    q, k, v = inputs(19, 23)
    keys = jax.random.split(jax.random.key(0), B)
    scoring = ScoreSpec(0.3, dropout_rate=0.5, dropout_rngs=keys)
    chosen = normal(5, B, 19, N, VALUES)

    @jax.jit
    def total(q: Any, v: Any) -> Any:
        return (attend_blockwise(q, k, v, Mask(), scoring, block_size=8).y * chosen).sum()

    gradient_q, gradient_v = jax.jit(jax.grad(total, (0, 1)))(q, v)
    step = normal(6, *v.shape)
    # Linear in the values: the difference is exact but for rounding.
    moved = float(total(q, v + step) - total(q, v))
    assert moved == pytest.approx(float((gradient_v * step).sum()), rel=1e-3)
    step = 1e-2 * normal(8, *q.shape)
    moved = float(total(q + step, v) - total(q - step, v))
    assert moved == pytest.approx(2 * float((gradient_q * step).sum()), rel=1e-2)

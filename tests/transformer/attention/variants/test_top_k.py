"""Top-k attention against sorting all scores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import (
    Array,
    array,
    assert_close,
    assert_trees_close,
    attention,
    normal,
)
from tests.transformer.mixers import apply_mixer, dense_attention, make_mixer, value_and_gradients
from transformer import Mask, MaskPattern, TopKConfig
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.attention.variants.top_k import (
    TopKAttention,
    attend_top_k,
    nth_largest,
    top_k_mask,
)

B, T, D, N, K, H, CHOSEN = 2, 11, 6, 4, 2, 3, 3
CONFIG = TopKConfig(num_heads=N, num_kv_heads=K, head_dim=H, keys_per_query=CHOSEN)
SEGMENTS = array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]])
WEIGHTS = frozenset({"weights"})


def top_k_scores(q: Array, k: Array, b: int, n: int, t: int) -> Array:  # [S] inputs of the softmax
    """Return the highest scores under a causal mask, and -inf for all other keys."""
    scores = k @ q / math.sqrt(H)
    visible = np.flatnonzero((SEGMENTS[b] == SEGMENTS[b, t]) & (np.arange(T) <= t))
    kept = visible[np.argsort(-scores[visible], kind="stable")[:CHOSEN]]
    return np.where(np.isin(np.arange(T), kept), scores, -np.inf)


def test_matches_loop_over_queries() -> None:
    mixer, params = make_mixer(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=True), segments=SEGMENTS)
    visible = np.asarray(dense_mask(mask.replace(positions=array([np.arange(T)])), T, T))
    y, weights = attention(x, x, params, visible, top_k_scores)
    assert_close(apply_mixer(mixer, params, x, mask=mask).y, y)
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=mask)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)
    assert np.asarray(weights > 0).sum(-1).max() == CHOSEN


@pytest.mark.parametrize("block", [3, 64])
def test_gradients_do_not_depend_on_block_size(block: int) -> None:
    q, k, v = normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)
    mask = Mask(MaskPattern(causal=True), segments=SEGMENTS)
    score_spec = ScoreSpec(1 / math.sqrt(H))
    plain = np.einsum("BTNH,BSNH->BNTS", q, np.repeat(k, N // K, 2)) / math.sqrt(H)
    shown = np.asarray(dense_mask(mask.replace(positions=array([np.arange(T)])), T, T))[:, None]
    order = np.argsort(np.argsort(-np.where(shown, plain, -np.inf), axis=-1, kind="stable"), -1)
    chosen = (order < CHOSEN) & shown

    actual = value_and_gradients(
        lambda q, k, v: attend_top_k(q, k, v, mask, score_spec, CHOSEN, block_size=block), q, k, v
    )
    expected = value_and_gradients(lambda q, k, v: dense_attention(q, k, v, chosen), q, k, v)
    assert_trees_close(actual, expected)


def test_ties_select_the_first_keys() -> None:
    scores = array([2.0, 1.0, 3.0, 1.0, 1.0, 9.0]).reshape(1, 1, 1, 6)
    visible = array([True] * 5 + [False]).reshape(1, 1, 1, 6)
    select = jax.jit(top_k_mask, static_argnums=2)
    for count, chosen in ((1, [2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (7, [0, 1, 2, 3, 4])):
        assert np.flatnonzero(select(scores, visible, count)).tolist() == chosen
    assert not np.any(select(scores, np.zeros_like(visible), 2))


def test_flops() -> None:
    """Scores of 11 keys, or 6 on average under a causal mask; values of 3 keys, or 30 / 11."""
    each = 2 * N * H
    assert TopKAttention.score_flops(CONFIG, D, T) == (
        each * (11 + 3),
        each * 6 + round(each * 30 / 11),
    )


ROWS = np.concatenate(
    [
        normal(0, 5, 17),
        1e30 * normal(1, 3, 17),
        1e-40 * normal(2, 2, 17),  # subnormal numbers
        np.round(2 * normal(3, 4, 17)),  # many ties
        np.where(normal(4, 3, 17) > 0, -np.inf, normal(5, 3, 17)),
        np.full((1, 17), -np.inf),
        np.full((1, 17), np.inf),
    ]
).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_nth_largest_matches_sorting(count: int) -> None:
    actual = jax.jit(nth_largest, static_argnums=1)(jnp.asarray(ROWS), count)
    assert np.array_equal(actual, np.sort(ROWS, axis=-1)[:, ::-1][:, count - 1 : count])


def test_nth_largest_in_bfloat16() -> None:
    rows = jnp.asarray(ROWS[:5], jnp.bfloat16)
    actual = jax.jit(nth_largest, static_argnums=1)(rows, 3)
    assert actual.dtype == jnp.bfloat16
    assert np.array_equal(actual, np.sort(np.asarray(rows, np.float32), axis=-1)[:, -3:-2])

"""Attention within groups against loops over all pairs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.compiled import largest_array
from tests.transformer.formulas import Array, assert_close, normal, softmax
from transformer.attention.sparse_ops.grouped_window import (
    CHUNK_SIZE,
    attend_grouped,
    group_positions,
    split_groups_by_document,
)

B, N, H, VALUES, WINDOW = 2, 3, 5, 7, 4
T = CHUNK_SIZE + 13  # more than a chunk, and no multiple


def grouped(groups: int, length: int = T) -> Any:  # [B, N, T]
    """Some tokens of no group; the first head has all others in one, longer than a chunk."""
    found = np.random.default_rng(0).integers(-1, groups, (B, N, length))
    return np.where(np.arange(N)[None, :, None] == 0, np.minimum(found, 0), found)


def members(groups: Array, b: int, n: int, t: int, window: int, causal: bool) -> list[int]:
    """Return the last `window` members of the query's group; not causal: as many after it too."""
    if groups[b, n, t] < 0:
        return []
    alike = np.flatnonzero(groups[b, n] == groups[b, n, t])
    before, after = alike[alike <= t], alike[alike > t]
    return [*before[-window:], *([] if causal else after[: window - 1])]


def inputs(length: int = T) -> Any:
    shapes = ((0, H), (1, H), (2, VALUES))
    return tuple(normal(seed, B, length, N, width) for seed, width in shapes)


def dense(groups: Array, window: int, causal: bool) -> Any:  # [B, N, T, T]
    seen = np.zeros((*groups.shape, groups.shape[2]), bool)
    for b, n, t in np.ndindex(groups.shape):
        seen[b, n, t, members(groups, b, n, t, window, causal)] = True
    return seen


def whole(q: Any, k: Any, v: Any, seen: Any, gain: Any = 0.0) -> tuple[jax.Array, jax.Array]:
    """The same with all scores at once, to be differentiated."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H) + gain
    raised = jnp.where(seen, jnp.exp(scores), 0)
    total = raised.sum(-1)
    y = jnp.einsum("BNTS,BSNH->BTNH", raised / jnp.where(total > 0, total, 1)[..., None], v)
    return y, jnp.log(jnp.where(total > 0, total, 1))


def probe(found: Any) -> jax.Array:
    """A number that goes by every entry of results and sums; no group counts nothing."""
    y, lse = found
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, WINDOW, 2 * T])
def test_values_query_by_query(window: int, causal: bool) -> None:
    q, k, v = inputs()
    groups = grouped(4)
    how: Any = dict(causal=causal, scale=1 / math.sqrt(H))
    attend = jax.jit(lambda q, k, v, g: attend_grouped(q, k, v, g, window, **how))
    found = attend(q, k, v, groups)
    y, lse = np.zeros((B, T, N, VALUES)), np.full((B, N, T), -np.inf)
    for b, n, t in np.ndindex(B, N, T):
        seen = members(groups, b, n, t, window, causal)
        if seen:
            scores = k[b, seen, n] @ q[b, t, n] / math.sqrt(H)
            y[b, t, n] = softmax(scores) @ v[b, seen, n]
            lse[b, n, t] = np.log(np.exp(scores).sum())
    assert_close(found.y, y)
    assert np.array_equal(np.isfinite(found.lse), groups >= 0)
    assert_close(np.where(groups >= 0, found.lse, 0), np.where(groups >= 0, lse, 0))


def alike(q_marks: Any, k_marks: Any) -> Any:
    """Return a score bias of 0.5 where the first inputs of query and key are equal."""
    return 0.5 * (q_marks[..., :, None, 0] == k_marks[..., None, :, 0])


@pytest.mark.slow
@pytest.mark.sampled("True-True", "False-False")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gains", [True, False])
def test_gradients(causal: bool, gains: bool) -> None:
    groups = grouped(4)
    marks = np.random.default_rng(1).integers(0, 3, (B, N, T, 1))
    gain = alike(marks, marks) if gains else 0.0
    given: dict[str, Any] = (
        dict(score_bias_fn=alike, bias_inputs=jnp.asarray(marks)) if gains else {}
    )
    given |= dict(causal=causal, scale=1 / math.sqrt(H))

    def one(q: Any, k: Any, v: Any) -> jax.Array:
        return probe(attend_grouped(q, k, v, groups, WINDOW, **given))

    def other(q: Any, k: Any, v: Any) -> jax.Array:
        return probe(whole(q, k, v, dense(groups, WINDOW, causal), gain))

    got = jax.jit(jax.value_and_grad(one, (0, 1, 2)))(*inputs())
    expected = jax.jit(jax.value_and_grad(other, (0, 1, 2)))(*inputs())
    assert_close(got[0], expected[0])
    for each, like in zip(got[1], expected[1], strict=True):
        assert_close(each, like)


def test_later_tokens_change_no_bit_wherever_they_are_sorted() -> None:
    """Later tokens of earlier groups come first in the sorted row and shift all others."""
    q, k, v = inputs()
    groups, cut = grouped(4), T // 2
    attend = jax.jit(lambda q, k, v, g: attend_grouped(q, k, v, g, WINDOW, causal=True, scale=1.0))
    y = attend(q, k, v, groups).y
    for group in (-1, 0, 3):
        later = np.where(np.arange(T) < cut, groups, group)
        assert np.array_equal(attend(q, k, v, later).y[:, :cut], y[:, :cut])


def test_places_tell_who_sees_whom() -> None:
    groups = grouped(4)
    where = np.asarray(group_positions(groups, WINDOW))
    near = np.abs(where[..., :, None] - where[..., None, :]) < WINDOW
    near &= (groups >= 0)[..., None]
    assert np.array_equal(near, dense(groups, WINDOW, causal=False))


def test_documents_have_groups_of_their_own() -> None:
    groups: Any = np.array([[[0, 2, 2, 1, 2]]])
    documents: Any = np.array([[1, 1, 2, 2, 0]])
    assert split_groups_by_document(groups, 3, documents).tolist() == [[[3, 5, 8, 7, -1]]]
    assert split_groups_by_document(groups, 3, None) is groups


def test_no_array_is_as_large_as_all_pairs() -> None:
    """Neither forward nor backward, in the compiled program."""
    length = 2048
    arrays = [jax.ShapeDtypeStruct((1, length, 1, 2), np.float32)] * 3
    groups = jax.ShapeDtypeStruct((1, 1, length), np.int32)

    def total(q: Any, k: Any, v: Any, groups: Any) -> jax.Array:
        return probe(attend_grouped(q, k, v, groups, 16, causal=True, scale=1.0))

    assert largest_array(jax.grad(total, (0, 1, 2)), *arrays, groups) < 20 * length

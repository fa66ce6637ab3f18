"""Attention within groups of tokens, against loops over all pairs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, normal
from tests.transformer.mixers import visible_in_groups
from transformer.attention.sparse_ops.grouped_window import (
    CHUNK_SIZE,
    attend_grouped,
    group_positions,
    split_groups_by_document,
)

B, N, H, VALUES, WINDOW = 2, 3, 5, 7, 4
T = CHUNK_SIZE + 13  # more than one chunk, and not a multiple


def random_groups(groups: int, length: int = T) -> Any:  # [B, N, T]
    """Return the group of each token, -1 for none.

    In the first head, one group is longer than a chunk.
    """
    groups_of_tokens = np.random.default_rng(0).integers(-1, groups, (B, N, length))
    return np.where(
        np.arange(N)[None, :, None] == 0, np.minimum(groups_of_tokens, 0), groups_of_tokens
    )


def inputs(length: int = T) -> Any:
    shapes = ((0, H), (1, H), (2, VALUES))
    return tuple(normal(seed, B, length, N, width) for seed, width in shapes)


def dense_attention(
    q: Any, k: Any, v: Any, visible: Any, score_bias: Any = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Return y and the log-sum-exp from a full matrix of scores, differentiable."""
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H) + score_bias
    exp_scores = jnp.where(visible, jnp.exp(scores), 0)
    total = exp_scores.sum(-1)
    y = jnp.einsum("BNTS,BSNH->BTNH", exp_scores / jnp.where(total > 0, total, 1)[..., None], v)
    return y, jnp.log(jnp.where(total > 0, total, 1))


def equal_marks_bias(q_marks: Any, k_marks: Any) -> Any:
    """Return a score bias of 0.5 where the first inputs of query and key are equal."""
    return 0.5 * (q_marks[..., :, None, 0] == k_marks[..., None, :, 0])


@pytest.mark.sampled("4-True-True", "4-False-False")
@pytest.mark.parametrize(
    ("window", "causal", "biased"),
    [
        (1, True, False),
        (WINDOW, True, True),
        (WINDOW, False, False),
        (WINDOW, False, True),
        (2 * T, False, False),
    ],
)
def test_matches_dense_attention(window: int, causal: bool, biased: bool) -> None:
    """Values, the log-sum-exp, and the gradients of a number that depends on both."""
    groups = random_groups(4)
    marks = np.random.default_rng(1).integers(0, 3, (B, N, T, 1))
    kwargs: dict[str, Any] = dict(causal=causal, scale=1 / math.sqrt(H))
    if biased:
        kwargs |= dict(score_bias_fn=equal_marks_bias, bias_inputs=jnp.asarray(marks))
    score_bias = equal_marks_bias(marks, marks) if biased else 0.0
    visible = visible_in_groups(groups, window, causal)

    def grouped(q: Any, k: Any, v: Any) -> Any:
        return attend_grouped(q, k, v, groups, window, **kwargs)

    def dense(q: Any, k: Any, v: Any) -> Any:
        return dense_attention(q, k, v, visible, score_bias)

    def values_and_gradients(attend: Any) -> Any:
        def total(q: Any, k: Any, v: Any) -> Any:
            y, lse = attend(q, k, v)
            finite = jnp.where(groups >= 0, lse, 0)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(finite)), (y, finite, lse)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*inputs())

    ((_, (y, lse, unfiltered)), gradients) = values_and_gradients(grouped)
    ((_, (expected_y, expected_lse, _)), expected_gradients) = values_and_gradients(dense)
    assert_close(y, expected_y)
    assert_close(lse, expected_lse)
    assert np.array_equal(np.isfinite(unfiltered), groups >= 0)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected)


def test_future_tokens_do_not_change_past_outputs() -> None:
    """Bit for bit, also when later tokens sort before earlier ones because their group comes
    first.
    """
    q, k, v = inputs()
    groups, cut = random_groups(4), T // 2
    attend = jax.jit(lambda q, k, v, g: attend_grouped(q, k, v, g, WINDOW, causal=True, scale=1.0))
    y = attend(q, k, v, groups).y
    for group in (-1, 0, 3):
        changed = np.where(np.arange(T) < cut, groups, group)
        assert np.array_equal(attend(q, k, v, changed).y[:, :cut], y[:, :cut])


def test_group_positions_determine_visibility() -> None:
    groups = random_groups(4)
    positions = np.asarray(group_positions(groups, WINDOW))
    visible = np.abs(positions[..., :, None] - positions[..., None, :]) < WINDOW
    visible &= (groups >= 0)[..., None]
    assert np.array_equal(visible, visible_in_groups(groups, WINDOW, causal=False))


def test_groups_are_split_by_document() -> None:
    groups: Any = np.array([[[0, 2, 2, 1, 2]]])
    documents: Any = np.array([[1, 1, 2, 2, 0]])
    assert split_groups_by_document(groups, 3, documents).tolist() == [[[3, 5, 8, 7, -1]]]
    assert split_groups_by_document(groups, 3, None) is groups

"""Global tokens of packed documents in bfloat16: sums over thousands of tokens against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.transformer.formulas import Array, array, normal
from transformer.attention.masks import Mask
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.global_tokens import (
    attend_from_document_globals,
    attend_to_document_globals,
    find_document_globals,
    list_tokens,
    mask_duplicates,
)
from transformer.attention.sparse_ops.mask_tokens import Tokens

T, FIRST, H = 2560, 2048, 4  # row length, length of the first document, head width
SIZES = (FIRST, T - FIRST)
POSITIONS = array([np.concatenate([np.arange(size) for size in SIZES])])
SEGMENTS = array(np.repeat([[1, 2]], SIZES, axis=1))
MASK = Mask(positions=POSITIONS, segments=SEGMENTS, key_segments=SEGMENTS)
INDEX = find_document_globals(Tokens(POSITIONS, SEGMENTS), array([[0]]))  # of one position
SCALE = 0.5
DOCUMENTS = ((0, slice(0, FIRST)), (FIRST, slice(FIRST, T)))  # the global token of each


def inputs() -> Any:
    """Return q, k and v that bfloat16 represents exactly, with a mean of 1 so that sums grow."""
    arrays = (normal(seed, 1, T, 1, H) + 1 for seed in range(3))
    return tuple(jnp.asarray(each, jnp.bfloat16) for each in arrays)


def to_float64(x: Any) -> Array:  # [1, T, 1, H] -> [T, H]
    return np.asarray(x.astype(jnp.float32), np.float64)[0, :, 0]


def assert_near(got: Any, expected: Array) -> None:
    """Assert equality within 2% of the largest value: a few roundings to 8 bits.

    A sum accumulated in bfloat16, which stops growing at 512, is 7% off.
    """
    assert got.dtype == jnp.bfloat16
    assert np.abs(to_float64(got) - expected).max() <= 0.02 * np.abs(expected).max()


def test_repeated_positions_count_once() -> None:
    found = mask_duplicates(array([[3, 0, 3, -1], [5, 5, 5, 8]]))
    assert found.tolist() == [[3, 0, -1, -1], [5, -1, -1, 8]]


def test_lists_are_in_the_order_of_the_row() -> None:
    """A list takes the first tokens, and fills up with the length."""
    is_listed = array([[False, True, True, False, True], [False, False, False, True, False]])
    assert list_tokens(is_listed, 2).tolist() == [[1, 2], [3, 5]]


def test_global_tokens_of_documents() -> None:
    """Two documents and padding; the second document is too short for the last position."""
    segments = array([[4, 4, 4, 7, 7, 0]])
    tokens = Tokens(array([[0, 1, 2, 0, 1, 0]]), segments)
    found = find_document_globals(tokens, array([[0, 2, -1]]))
    assert found[:, 0].tolist() == [[0, 0, 0, 3, 3, 6], [2, 2, 2, 6, 6, 6], [6] * 6]


def test_global_rows_and_gradients_match_formula() -> None:
    """Each document's global token attends to the whole document."""
    q, k, v = inputs()

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            return attend_from_document_globals(q, k, v, MASK, ScoreSpec(SCALE), INDEX)

        y, vjp_fn = jax.vjp(run, q, k, v)
        return y, vjp_fn(jnp.ones_like(y))

    y, gradients = both(q, k, v)
    wq, wk, wv = to_float64(q), to_float64(k), to_float64(v)
    rows, dq, dk, dv = (np.zeros((T, H)) for _ in range(4))
    for first, tokens in DOCUMENTS:
        exp_scores = np.exp(SCALE * wk[tokens] @ wq[first])
        weights = exp_scores / exp_scores.sum()
        rows[first] = weights @ wv[tokens]
        d_scores = weights * (wv[tokens].sum(-1) - rows[first].sum())
        dq[first] = SCALE * d_scores @ wk[tokens]
        dk[tokens] = SCALE * d_scores[:, None] * wq[first]
        dv[tokens] = weights[:, None]
    assert_near(y, rows)
    for actual, expected in zip(gradients, (dq, dk, dv), strict=True):
        assert_near(actual, expected)


def test_global_key_and_value_gradients_sum_over_documents() -> None:
    """Every token of a document contributes to the gradients of its global token."""
    q, k, v = inputs()

    @jax.jit
    def gradients(k: Any, v: Any) -> Any:
        def total(k: Any, v: Any) -> Any:
            result = attend_to_document_globals(q, k, v, MASK, ScoreSpec(SCALE), INDEX)
            return result.lse.sum() + result.y.astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1))(k, v)

    dk, dv = np.zeros((T, H)), np.zeros((T, H))
    for first, tokens in DOCUMENTS:  # the only key, so its weight is 1 whatever the query
        dk[first] = SCALE * to_float64(q)[tokens].sum(0)
        dv[first] = tokens.stop - tokens.start
    for result, expected in zip(gradients(k, v), (dk, dv), strict=True):
        assert_near(result, expected)

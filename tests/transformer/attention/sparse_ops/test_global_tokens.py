"""Global tokens of documents in 16 bits: sums over thousands of tokens against those of float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.transformer.formulas import Array, array, normal
from transformer.attention.attend import ScoreSpec
from transformer.attention.masks import Mask
from transformer.attention.sparse_ops.global_tokens import (
    attend_from_packed_globals,
    attend_to_packed_globals,
)

T, FIRST, H = 2560, 2048, 4  # of them the first document's; a head's width
SIZES = (FIRST, T - FIRST)
POSITIONS = array([np.concatenate([np.arange(size) for size in SIZES])])
SEGMENTS = array(np.repeat([[1, 2]], SIZES, axis=1))
MASK = Mask(positions=POSITIONS, segments=SEGMENTS, key_segments=SEGMENTS)
LISTED = array([[0]])
SCALE = 0.5
DOCUMENTS = ((0, slice(0, FIRST)), (FIRST, slice(FIRST, T)))  # the global token of each


def given() -> Any:
    """Queries, keys and values that 16 bits hold. No mean is near 0, so that sums grow."""
    made = (normal(seed, 1, T, 1, H) + 1 for seed in range(3))
    return tuple(jnp.asarray(each, jnp.bfloat16) for each in made)


def wide(x: Any) -> Array:  # [1, T, 1, H] -> [T, H]
    return np.asarray(x.astype(jnp.float32), np.float64)[0, :, 0]


def assert_near(got: Any, expected: Array) -> None:
    """To 2% of the largest: a few roundings to 8 bits. A sum that stops growing is 7% off at 512"""
    assert got.dtype == jnp.bfloat16
    assert np.abs(wide(got) - expected).max() <= 0.02 * np.abs(expected).max()


def test_rows_of_global_tokens() -> None:
    """The row of a global token, and the gradient of its sum, by the formula."""
    q, k, v = given()

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            return attend_from_packed_globals(
                jnp.zeros_like(q), q, k, v, MASK, ScoreSpec(SCALE), LISTED
            )

        y, pull = jax.vjp(run, q, k, v)
        return y, pull(jnp.ones_like(y))

    y, gradients = both(q, k, v)
    wq, wk, wv = wide(q), wide(k), wide(v)
    rows, dq, dk, dv = (np.zeros((T, H)) for _ in range(4))
    for first, theirs in DOCUMENTS:
        raised = np.exp(SCALE * wk[theirs] @ wq[first])
        weights = raised / raised.sum()
        rows[first] = weights @ wv[theirs]
        d_scores = weights * (wv[theirs].sum(-1) - rows[first].sum())
        dq[first] = SCALE * d_scores @ wk[theirs]
        dk[theirs] = SCALE * d_scores[:, None] * wq[first]
        dv[theirs] = weights[:, None]
    assert_near(y, rows)
    for got, expected in zip(gradients, (dq, dk, dv), strict=True):
        assert_near(got, expected)


def test_gradients_of_global_keys_and_values() -> None:
    """Every token of a document adds to those of its global token."""
    q, k, v = given()

    @jax.jit
    def gradients(k: Any, v: Any) -> Any:
        def total(k: Any, v: Any) -> Any:
            found = attend_to_packed_globals(q, k, v, MASK, ScoreSpec(SCALE), LISTED)
            return found.lse.sum() + found.y.astype(jnp.float32).sum()

        return jax.grad(total, argnums=(0, 1))(k, v)

    dk, dv = np.zeros((T, H)), np.zeros((T, H))
    for first, theirs in DOCUMENTS:  # one key: its weight is 1 whatever the query
        dk[first] = SCALE * wide(q)[theirs].sum(0)
        dv[first] = theirs.stop - theirs.start
    for got, expected in zip(gradients(k, v), (dk, dv), strict=True):
        assert_near(got, expected)

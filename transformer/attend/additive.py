"""Scores of an MLP with one hidden layer (Bahdanau et al. 2015)."""

import functools

import jax
import jax.numpy as jnp

from transformer.contract import DTypeLike


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def additive_scores(
    score_vector: jax.Array,  # [N, A]
    q: jax.Array,  # [B, T, N, A]
    k: jax.Array,  # [B, S, K, A]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, N, T, S]
    """vector . tanh(q + k) for each head, query and key, computed in `dtype`.

    There are no products of matrices, whose operands would have to be narrow: `operand_dtype` is there
    as `Scoring.score_fn` gives it.

    The hidden layers [B, T, S, N, A] are computed again in the backward pass: kept, they would be
    A times as large as the scores.
    """
    b, t, n, width = q.shape
    s, heads = k.shape[1:3]
    score_vector, q, k = (each.astype(dtype) for each in (score_vector, q, k))
    grouped = q.reshape(b, t, 1, heads, n // heads, width)
    hidden = jnp.tanh(grouped + k[:, None, :, :, None])
    weights = score_vector.reshape(1, 1, 1, heads, n // heads, width)
    return jnp.moveaxis((hidden * weights).sum(-1).reshape(b, t, s, n), -1, 1)

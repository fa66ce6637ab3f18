"""Attention as the formula has it: all scores at once. The oracle of every other form."""

import jax
import jax.numpy as jnp

from transformer.attend.scoring import Scoring, averages
from transformer.contract import wide
from transformer.dropout import dropout
from transformer.masks import Mask, dense
from transformer.precision import lowest


def attend_reference(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: Scoring,
    sinks: jax.Array | None = None,  # [N]
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, H of values], weights [B, N, T, S]
    """softmax(scale q k^T + bias under the mask) v (Vaswani et al. 2017, equation 1).

    A query that sees nothing gets zeros, and passes no gradient. A sink is the score of one more
    key, whose value is zero (Agarwal et al. 2025, section 2.2).
    """
    sizes = q.shape[1], k.shape[1]
    places = mask.places(*sizes)
    scores = scoring.scores(q, k, *places)
    seen = dense(mask, *sizes)[:, None]
    scores = jnp.where(seen, scores, lowest(scores.dtype))
    weights = jax.nn.softmax(scores, axis=-1) if sinks is None else _beside(scores, sinks)
    if mask.rows_may_be_empty(*sizes):
        weights = jnp.where(seen.any(-1, keepdims=True), weights, 0)
    operands = scoring.operands_of(v)
    dtype = wide(operands, scoring.softmax_dtype)
    dropped = dropout(weights, scoring.rate, scoring.dropout_rngs)
    y = averages(dropped.astype(dtype), v, operands, dtype)
    if scoring.relative is not None:
        y = y + scoring.relative.look_up(dropped.astype(dtype), *places, dtype)
    return y.astype(v.dtype), weights


def _beside(
    scores: jax.Array,  # [B, N, T, S]
    sinks: jax.Array,  # [N]
) -> jax.Array:  # [B, N, T, S]
    """A softmax over the scores and the sink, of which the sink's own weight is left out."""
    column = sinks.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]

"""Attention as the formula has it: all scores at once. The oracle of every other form."""

import jax
import jax.numpy as jnp

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.score_spec import ScoreSpec, weighted_values
from transformer.layers.dropout import dropout
from transformer.layers.precise_einsum import accumulation_dtype
from transformer.precision import finfo_min


def attend_reference(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    sink_logits: jax.Array | None = None,  # [N]
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, H of values], weights [B, N, T, S]
    """softmax(scale q k^T + bias under the mask) v (Vaswani et al. 2017, equation 1).

    A query that sees nothing gets zeros, and passes no gradient. A sink is the score of one more
    key, whose value is zero (Agarwal et al. 2025, section 2.2).
    """
    sizes = q.shape[1], k.shape[1]
    places = mask.resolved_positions(*sizes)
    scores = score_spec.compute_scores(q, k, *places)
    seen = dense_mask(mask, *sizes)[:, None]
    scores = jnp.where(seen, scores, finfo_min(scores.dtype))
    weights = (
        jax.nn.softmax(scores, axis=-1) if sink_logits is None else _beside(scores, sink_logits)
    )
    if mask.may_have_empty_rows(*sizes):
        weights = jnp.where(seen.any(-1, keepdims=True), weights, 0)
    operands = score_spec.operand_dtype_of(v)
    dtype = accumulation_dtype(operands, score_spec.softmax_dtype)
    dropped = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs)
    y = weighted_values(dropped.astype(dtype), v, operands, dtype)
    if score_spec.relative_tables is not None:
        y = y + score_spec.relative_tables.value_terms(dropped.astype(dtype), *places, dtype)
    return y.astype(v.dtype), weights


def _beside(
    scores: jax.Array,  # [B, N, T, S]
    sinks: jax.Array,  # [N]
) -> jax.Array:  # [B, N, T, S]
    """A softmax over the scores and the sink, of which the sink's own weight is left out."""
    column = sinks.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]

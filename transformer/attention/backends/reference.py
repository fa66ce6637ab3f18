"""Reference implementation: the formula, with all scores in memory. The oracle of every backend."""

import jax
import jax.numpy as jnp

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.score_spec import ScoreSpec, weighted_values
from transformer.layers.dropout import dropout


def attend_reference(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    sink_logits: jax.Array | None = None,  # [N]
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, H of values], weights [B, N, T, S]
    """Return softmax(scores under the mask) v (Vaswani et al. 2017, equation 1).

    A query without a visible key gets zeros and no gradient.
    """
    lengths = q.shape[1], k.shape[1]
    positions = mask.resolved_positions(*lengths)
    scores = score_spec.compute_scores(q, k, *positions)
    visible = dense_mask(mask, *lengths)[:, None]
    # The most negative finite number, since -inf gives NaN in a row without a visible key.
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    if sink_logits is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sinks(scores, sink_logits)
    if mask.may_have_empty_rows(*lengths):
        weights = jnp.where(visible.any(-1, keepdims=True), weights, 0)
    operand_dtype = score_spec.operand_dtype_of(v)
    dtype = jnp.promote_types(operand_dtype, score_spec.softmax_dtype)
    dropped = weights
    if score_spec.dropout_rate and score_spec.dropout_rngs is not None:
        dropped = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs)
    y = weighted_values(dropped.astype(dtype), v, operand_dtype, dtype)
    if score_spec.relative_tables is not None:
        y = y + score_spec.relative_tables.value_terms(dropped.astype(dtype), *positions, dtype)
    return y.astype(v.dtype), weights


def _softmax_with_sinks(
    scores: jax.Array,  # [B, N, T, S]
    sink_logits: jax.Array,  # [N]
) -> jax.Array:  # [B, N, T, S]
    """Return the softmax over the scores and the sink, without the sink's own weight.

    A sink is the score of one more key, whose value is zero (Agarwal et al. 2025, section 2.2).
    """
    column = sink_logits.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]

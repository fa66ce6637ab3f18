"""Softmax attention to the keys that score highest for each query (Gupta et al. 2021)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.attend.scoring import ScoreSpec, weighted_values
from transformer.attend.sparse.map_queries import (
    QUERY_BLOCK_SIZE,
    SAVED_QUERY_BLOCK_RESIDUALS,
    map_query_blocks,
)
from transformer.attend.sparse.nth_largest import nth_largest
from transformer.attend.sparse.softmax_where import softmax_where
from transformer.attend.tiles import Tiling, pad_mask, tile_mask
from transformer.contract import accumulation_dtype
from transformer.dropout import dropout, fold_in
from transformer.masks import Mask, dense_mask


def attend_top_k(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: ScoreSpec,
    keys_per_query: int,
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> jax.Array:  # [B, T, N, H of values]
    """Each query averages the values of its `keys_per_query` keys, in blocks of queries (section 2)."""
    queries, keys = q.shape[1], k.shape[1]
    tiling = Tiling(queries, keys, min(block_size, queries), keys, lookback=None, lookahead=None)
    given, dtype = pad_mask(mask, tiling), v.dtype
    # All blocks of queries add to the gradients of the keys: as float32, rounded once.
    scoring, (q, k, v) = scoring.widen(q, k, v)

    def one(row: jax.Array, q: jax.Array) -> jax.Array:
        weights = top_k_weights(q, k, tile_mask(given, tiling, row, 0), scoring, keys_per_query)
        return apply_top_k_weights(
            weights, v, scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, row))
        )

    return map_query_blocks(one, (q,), block_size=block_size).astype(dtype)


def apply_top_k_weights(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H of values]
    scoring: ScoreSpec,
) -> jax.Array:  # [B, T, N, H of values]
    """The average of the values under the weights, some of which are dropped."""
    operands = scoring.operand_dtype_of(v)
    sums = accumulation_dtype(operands, scoring.softmax_dtype)
    dropped = dropout(weights, scoring.dropout_rate, scoring.dropout_rngs).astype(sums)
    return weighted_values(dropped, v, operands, sums).astype(v.dtype)


def top_k_weights(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    mask: Mask,
    scoring: ScoreSpec,
    keys_per_query: int,
) -> jax.Array:  # [B, N, T, S]
    """The softmax over the `keys_per_query` highest scores that the mask shows; of all others zero."""
    scores = scoring.compute_scores(q, k, *mask.resolved_positions(q.shape[1], k.shape[1]))
    chosen = top_k_mask(scores, dense_mask(mask, q.shape[1], k.shape[1])[:, None], keys_per_query)
    return softmax_where(scores, chosen)[0]


def top_k_mask(
    scores: jax.Array,  # [B, N, T, S]
    visible: jax.Array,  # [B or 1, 1, T, S] booleans
    keys_per_query: int,
) -> jax.Array:  # [B, N, T, S] booleans
    """The `keys_per_query` highest scores of each query, of those seen; of equal ones the first keys."""
    scores = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
    least = checkpoint_name(
        nth_largest(scores, min(keys_per_query, scores.shape[-1])), SAVED_QUERY_BLOCK_RESIDUALS
    )
    above, equal = scores > least, scores == least
    room = keys_per_query - above.sum(-1, keepdims=True)
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1) <= room)))

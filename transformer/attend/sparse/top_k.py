"""Softmax attention to the keys that score highest for each query (Gupta et al. 2021)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.attend.scoring import Scoring, averages
from transformer.attend.sparse.map_queries import BLOCK, KEPT, map_queries
from transformer.attend.sparse.nth_largest import nth_largest
from transformer.attend.sparse.softmax_where import softmax_where
from transformer.attend.tiles import Tiling, tile_mask, whole
from transformer.contract import wide
from transformer.dropout import dropout, fold
from transformer.masks import Mask, dense


def attend_top_k(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: Scoring,
    count: int,
    *,
    block: int = BLOCK,
) -> jax.Array:  # [B, T, N, H of values]
    """Each query averages the values of its `count` keys, in blocks of queries (section 2)."""
    queries, keys = q.shape[1], k.shape[1]
    tiling = Tiling(queries, keys, min(block, queries), keys, behind=None, ahead=None)
    given, dtype = whole(mask, tiling), v.dtype
    # All blocks of queries add to the gradients of the keys: as float32, rounded once.
    scoring, (q, k, v) = scoring.widened(q, k, v)

    def one(row: jax.Array, q: jax.Array) -> jax.Array:
        weights = top_weights(q, k, tile_mask(given, tiling, row, 0), scoring, count)
        return top_values(
            weights, v, scoring._replace(dropout_rngs=fold(scoring.dropout_rngs, row))
        )

    return map_queries(one, (q,), block=block).astype(dtype)


def top_values(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H of values]
    scoring: Scoring,
) -> jax.Array:  # [B, T, N, H of values]
    """The average of the values under the weights, some of which are dropped."""
    operands = scoring.operands_of(v)
    sums = wide(operands, scoring.softmax_dtype)
    dropped = dropout(weights, scoring.rate, scoring.dropout_rngs).astype(sums)
    return averages(dropped, v, operands, sums).astype(v.dtype)


def top_weights(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    mask: Mask,
    scoring: Scoring,
    count: int,
) -> jax.Array:  # [B, N, T, S]
    """The softmax over the `count` highest scores that the mask shows; of all others zero."""
    scores = scoring.scores(q, k, *mask.places(q.shape[1], k.shape[1]))
    chosen = top(scores, dense(mask, q.shape[1], k.shape[1])[:, None], count)
    return softmax_where(scores, chosen)[0]


def top(
    scores: jax.Array,  # [B, N, T, S]
    seen: jax.Array,  # [B or 1, 1, T, S] booleans
    count: int,
) -> jax.Array:  # [B, N, T, S] booleans
    """The `count` highest scores of each query, of those seen; of equal ones the first keys."""
    scores = jnp.where(seen, jax.lax.stop_gradient(scores), -jnp.inf)
    least = checkpoint_name(nth_largest(scores, min(count, scores.shape[-1])), KEPT)
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdims=True)
    return seen & (above | (equal & (jnp.cumsum(equal, axis=-1) <= room)))

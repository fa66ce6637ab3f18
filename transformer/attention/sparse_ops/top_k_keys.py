"""Attention to selected keys, one block of queries at a time.

Scores of a block of queries against all keys exist only while the block is processed, so memory is
linear in T. Two selections: the k highest scores (Gupta et al. 2021) and the last members of a
group among cached keys.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.attention.backends.tiling import Tiling, pad_mask, tile_mask
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.score_spec import ScoreSpec, dot_product_scores, weighted_values
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype

FLOAT32_BITS = 32


def nth_largest(
    x: jax.Array,  # [..., S]
    n: int,  # n, from 1 to S
) -> jax.Array:  # [..., 1]
    """Return the n-th largest entry of each row, exactly and without sorting.

    Build its bits from the highest to the lowest: a bit is set if at least n entries are as large
    as the number with it. This takes 32 comparisons per entry. `jax.lax.top_k` sorts each row,
    which takes twenty times as long on a CPU. Rows must not contain NaN.
    """
    wide = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(1 << (FLOAT32_BITS - 1))
    # As unsigned numbers in the order of the floats: negative ones have all bits flipped.
    ordered = jnp.where(wide >= top, ~wide, wide | top)

    def settle(step: jax.Array, found: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << jnp.uint32(FLOAT32_BITS - 1 - step)
        more = found | bit
        enough = jnp.sum(ordered >= more, axis=-1, keepdims=True) >= n
        return jnp.where(enough, more, found)

    found = jax.lax.fori_loop(0, FLOAT32_BITS, settle, jnp.zeros_like(ordered[..., :1]))
    back = jnp.where(found >= top, found ^ top, ~found)
    return jax.lax.bitcast_convert_type(back, jnp.float32).astype(x.dtype)


QUERY_BLOCK_SIZE = 128


SAVED_QUERY_BLOCK_RESIDUALS = "kept of a block of queries"
"""Checkpoint name of the values that the backward pass reads instead of recomputing them."""


def map_query_blocks(
    attend: Callable[..., jax.Array],
    queries: tuple[jax.Array, ...],  # [B, T, ...] each
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> jax.Array:  # [B, T, ...]
    """Apply `attend(block_index, *blocks [B, R, ...]) -> [B, R, ...]` to one block after the other.

    The last block is padded with zeros. The backward pass recomputes each block, except values
    named `SAVED_QUERY_BLOCK_RESIDUALS`.
    """
    length = queries[0].shape[1]
    size = min(block_size, length)
    count = -(-length // size)

    def cut(x: jax.Array) -> jax.Array:  # [blocks, B, R, ...]
        room = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, room).reshape(len(x), count, size, *x.shape[2:]), 1, 0)

    def one(inputs: tuple[Any, ...]) -> jax.Array:
        kept = jax.checkpoint_policies.save_only_these_names(SAVED_QUERY_BLOCK_RESIDUALS)
        return jax.checkpoint(attend, policy=kept)(*inputs)

    y = jnp.moveaxis(jax.lax.map(one, (jnp.arange(count), *map(cut, queries))), 0, 1)
    return y.reshape(len(y), count * size, *y.shape[3:])[:, :length]


def softmax_where(
    scores: jax.Array,  # [..., S]
    where: jax.Array,  # [..., S] booleans
) -> tuple[jax.Array, jax.Array]:  # [..., S], [...]
    """Return softmax weights over the entries where `where` is True, and their log-sum-exp.

    A row without such entries gets zero weights, -inf and no gradient.
    """
    scores = jnp.where(where, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    raised = jnp.exp(scores - largest)
    total = raised.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    return raised / total, jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]


def attend_last_group_members(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, N, H] in row s the key at position s
    v: jax.Array,  # [B, S, N, H of values]
    groups: jax.Array,  # [B, T, N] of the queries
    key_groups: jax.Array,  # [B, S, N]
    positions: jax.Array,  # [B, T] of the queries; -1: sees nothing
    window: int,
    *,
    scale: float,
    softmax_dtype: str = "float32",
) -> jax.Array:  # [B, T, N, H of values]
    """Compute causal `attend_grouped` for new queries over cached keys."""
    theirs = jnp.swapaxes(key_groups, 1, 2)[:, :, None]  # [B, N, 1, S]
    index = jnp.arange(k.shape[1])[None, None, None, :]
    operands, sums = q.dtype, accumulation_dtype(q.dtype, softmax_dtype)

    def one(
        row: jax.Array,
        q: jax.Array,  # [B, R, N, H]
        groups: jax.Array,  # [B, R, N]
        positions: jax.Array,  # [B, R]
    ) -> jax.Array:  # [B, R, N, H of values]
        same = jnp.swapaxes(groups, 1, 2)[..., None] == theirs
        before = same & (index <= positions[:, None, :, None])
        count = jnp.cumsum(before, axis=-1)
        last = before & (count[..., -1:] - count < window)
        scores = dot_product_scores(q, k, operands, sums).astype(softmax_dtype) * scale
        weights = softmax_where(scores, last)[0].astype(sums)
        return weighted_values(weights, v, operands, sums).astype(v.dtype)

    return map_query_blocks(one, (q, groups, positions))


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
    """Attend from each query to its `keys_per_query` highest-scoring keys (section 2)."""
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
    """Apply dropout to the weights and return the weighted sum of the values."""
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
    """Return softmax weights over the k highest visible scores, zero elsewhere."""
    scores = scoring.compute_scores(q, k, *mask.resolved_positions(q.shape[1], k.shape[1]))
    chosen = top_k_mask(scores, dense_mask(mask, q.shape[1], k.shape[1])[:, None], keys_per_query)
    return softmax_where(scores, chosen)[0]


def top_k_mask(
    scores: jax.Array,  # [B, N, T, S]
    visible: jax.Array,  # [B or 1, 1, T, S] booleans
    keys_per_query: int,
) -> jax.Array:  # [B, N, T, S] booleans
    """Return a mask of the k highest visible scores per query. Ties go to the lower index."""
    scores = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
    least = checkpoint_name(
        nth_largest(scores, min(keys_per_query, scores.shape[-1])), SAVED_QUERY_BLOCK_RESIDUALS
    )
    above, equal = scores > least, scores == least
    room = keys_per_query - above.sum(-1, keepdims=True)
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1) <= room)))

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

from transformer.attention.backends.tiling import Tiling, pad_mask, tile_mask, widen
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.reference import ScoreSpec, dot_product_scores, weighted_values
from transformer.layers.basic import dropout, fold_in
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
    # Float32 holds every 16-bit float exactly, so one width will do.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign_bit = jnp.uint32(1 << (FLOAT32_BITS - 1))
    # Map floats to unsigned integers in the same order: set the sign bit of positive numbers, flip
    # all bits of negative ones.
    ordered = jnp.where(bits >= sign_bit, ~bits, bits | sign_bit)

    def try_bit(step: jax.Array, result: jax.Array) -> jax.Array:
        # From the top: a lower bit cannot change the answer about a higher one. The result is the
        # largest number that n entries reach, which is one of them.
        bit = jnp.uint32(1) << jnp.uint32(FLOAT32_BITS - 1 - step)
        candidate = result | bit
        is_reached = jnp.sum(ordered >= candidate, axis=-1, keepdims=True) >= n
        return jnp.where(is_reached, candidate, result)

    result = jax.lax.fori_loop(0, FLOAT32_BITS, try_bit, jnp.zeros_like(ordered[..., :1]))
    # The inverse of the map above.
    float_bits = jnp.where(result >= sign_bit, result ^ sign_bit, ~result)
    return jax.lax.bitcast_convert_type(float_bits, jnp.float32).astype(x.dtype)


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
    block_length = min(block_size, length)
    num_blocks = -(-length // block_length)

    # Padding queries are zeros: their scores are finite, and their results cut off below.
    def split(x: jax.Array) -> jax.Array:  # [blocks, B, R, ...]
        padding = [(0, 0), (0, num_blocks * block_length - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(
            jnp.pad(x, padding).reshape(x.shape[0], num_blocks, block_length, *x.shape[2:]), 1, 0
        )

    def attend_block(inputs: tuple[Any, ...]) -> jax.Array:
        # The named values are thresholds, of 32 passes over the scores but one number in a row:
        # worth saving. The scores themselves are one product, and as large as all of attention's
        # memory.
        policy = jax.checkpoint_policies.save_only_these_names(SAVED_QUERY_BLOCK_RESIDUALS)
        return jax.checkpoint(attend, policy=policy)(*inputs)

    y = jnp.moveaxis(
        jax.lax.map(attend_block, (jnp.arange(num_blocks), *map(split, queries))), 0, 1
    )
    return y.reshape(y.shape[0], num_blocks * block_length, *y.shape[3:])[:, :length]


def softmax_where(
    scores: jax.Array,  # [..., S]
    where: jax.Array,  # [..., S] booleans
) -> tuple[jax.Array, jax.Array]:  # [..., S], [...]
    """Return softmax weights over the entries where `where` is True, and their log-sum-exp.

    A row without such entries gets zero weights, -inf and no gradient.
    """
    # -inf and not a low number: exp gives exactly 0, and a row without entries is recognized.
    scores = jnp.where(where, scores, -jnp.inf)
    # The maximum cancels in the weights, so no gradient has to pass through it.
    max_score = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    max_score = jnp.where(jnp.isfinite(max_score), max_score, 0)
    exp_scores = jnp.exp(scores - max_score)
    total = exp_scores.sum(-1, keepdims=True)
    has_entries = total > 0
    total = jnp.where(has_entries, total, 1)
    # Divided before the product with the values, which rounds: see `block_gather._attend_step`.
    return exp_scores / total, jnp.where(has_entries, max_score + jnp.log(total), -jnp.inf)[..., 0]


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
    grouped_keys = jnp.swapaxes(key_groups, 1, 2)[:, :, None]  # [B, N, 1, S]
    index = jnp.arange(k.shape[1])[None, None, None, :]
    operand_dtype, sum_dtype = q.dtype, accumulation_dtype(q.dtype, softmax_dtype)

    def attend_block(
        block_index: jax.Array,
        q: jax.Array,  # [B, R, N, H]
        groups: jax.Array,  # [B, R, N]
        positions: jax.Array,  # [B, R]
    ) -> jax.Array:  # [B, R, N, H of values]
        same_group = jnp.swapaxes(groups, 1, 2)[..., None] == grouped_keys
        earlier = same_group & (index <= positions[:, None, :, None])
        # The last `window` members are those with fewer than `window` members after them.
        member_count = jnp.cumsum(earlier, axis=-1)
        in_window = earlier & (member_count[..., -1:] - member_count < window)
        # All cached keys are scored and most are hidden: the places of the members in the cache
        # depend on the data, and gathering them would need a sort.
        scores = dot_product_scores(q, k, operand_dtype, sum_dtype).astype(softmax_dtype) * scale
        weights = softmax_where(scores, in_window)[0].astype(sum_dtype)
        return weighted_values(weights, v, operand_dtype, sum_dtype).astype(v.dtype)

    return map_query_blocks(attend_block, (q, groups, positions))


def attend_top_k(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    keys_per_query: int,
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> jax.Array:  # [B, T, N, H of values]
    """Attend from each query to its `keys_per_query` highest-scoring keys (section 2)."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    # A tile has all keys: the k highest scores of a query are known only from all of its scores.
    tiling = Tiling(
        num_queries, num_keys, min(block_size, num_queries), num_keys, lookback=None, lookahead=None
    )
    padded_mask, dtype = pad_mask(mask, tiling), v.dtype
    # All blocks of queries add to the gradients of the keys: widen first, so that the sum is
    # rounded once.
    score_spec, (q, k, v) = widen(score_spec, q, k, v)

    def attend_block(block_index: jax.Array, q: jax.Array) -> jax.Array:
        weights = top_k_weights(
            q, k, tile_mask(padded_mask, tiling, block_index, 0), score_spec, keys_per_query
        )
        return apply_top_k_weights(
            weights,
            v,
            # One traced block stands for all: without its index they would drop the same weights.
            score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, block_index)),
        )

    return map_query_blocks(attend_block, (q,), block_size=block_size).astype(dtype)


def apply_top_k_weights(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H of values]
    score_spec: ScoreSpec,
) -> jax.Array:  # [B, T, N, H of values]
    """Apply dropout to the weights and return the weighted sum of the values."""
    operand_dtype = score_spec.operand_dtype_of(v)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    dropped = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs).astype(sum_dtype)
    return weighted_values(dropped, v, operand_dtype, sum_dtype).astype(v.dtype)


def top_k_weights(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    mask: Mask,
    score_spec: ScoreSpec,
    keys_per_query: int,
) -> jax.Array:  # [B, N, T, S]
    """Return softmax weights over the k highest visible scores, zero elsewhere."""
    scores = score_spec.compute_scores(q, k, *mask.resolved_positions(q.shape[1], k.shape[1]))
    selected = top_k_mask(scores, dense_mask(mask, q.shape[1], k.shape[1])[:, None], keys_per_query)
    return softmax_where(scores, selected)[0]


def top_k_mask(
    scores: jax.Array,  # [B, N, T, S]
    visible: jax.Array,  # [B or 1, 1, T, S] booleans
    keys_per_query: int,
) -> jax.Array:  # [B, N, T, S] booleans
    """Return a mask of the k highest visible scores per query. Ties go to the lower index."""
    # Which keys are chosen has no gradient; the softmax over the chosen ones has.
    scores = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
    threshold = checkpoint_name(
        nth_largest(scores, min(keys_per_query, scores.shape[-1])), SAVED_QUERY_BLOCK_RESIDUALS
    )
    # Fill the remaining places with ties, lowest index first.
    above, equal = scores > threshold, scores == threshold
    num_ties = keys_per_query - above.sum(-1, keepdims=True)
    # `visible`, because with fewer than k visible keys the threshold is -inf, and hidden keys tie.
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1) <= num_ties)))

"""Attention to the last members of each query's group among the keys of a cache."""

import jax
import jax.numpy as jnp

from transformer.attend.scoring import dot_product_scores, weighted_values
from transformer.attend.sparse.map_queries import map_query_blocks
from transformer.attend.sparse.softmax_where import softmax_where
from transformer.contract import accumulation_dtype


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
    """What `attend_grouped` computes under a causal mask, for queries behind those of a cache."""
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

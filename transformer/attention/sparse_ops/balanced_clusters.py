"""Attention within clusters of equal size, which may overlap (Roy et al. 2021, algorithm 1).

Letters: E clusters, C tokens per cluster.
"""

import math

import jax
import jax.numpy as jnp

from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum


def nearest_tokens(
    affinity: jax.Array,  # [B, N, T, E] larger where nearer; -inf: not there
    cluster_size: int,  # C
) -> jax.Array:  # [B, N, E, C] indices of tokens
    """Return the tokens nearest to each cluster. Ties go to the lower index."""
    # Each cluster picks its tokens, not each token its cluster: sizes are equal and shapes static,
    # and a token may be in several clusters or in none.
    return jax.lax.top_k(affinity.swapaxes(2, 3), cluster_size)[1]


def membership_mask(
    members: jax.Array,  # [B, N, E, C]
    length: int,
) -> jax.Array:  # [B, N, E, T] booleans
    """Return a mask of the tokens that each cluster contains."""
    empty = jnp.zeros((*members.shape[:3], length), bool)
    return jnp.put_along_axis(empty, members, True, axis=-1, inplace=False)


def attend_balanced_clusters(
    q: jax.Array,  # [B, T, N, H] of length sqrt(H), as are keys
    k: jax.Array,  # [B, T, N, H]
    v: jax.Array,  # [B, T, N, H of values]
    query_members: jax.Array,  # [B, N, E, C]
    key_members: jax.Array,  # [B, N, E, C]
    is_token: jax.Array,  # [B or 1, T] booleans; False: neither sees nor is seen
    softmax_dtype: str = "float32",
) -> jax.Array:  # [B, T, N, H of values]
    """Compute a softmax over the keys of all clusters that contain the query.

    A key that shares m clusters with the query counts 1 / m in each of them. Queries in no cluster
    get zeros. Scores lie in [-sqrt(H), sqrt(H)] because q and k have length sqrt(H). The constant
    sqrt(H) is therefore subtracted in place of the row maximum, on which the clusters of a query
    would have to agree.
    """
    bound, length = math.sqrt(q.shape[-1]), q.shape[1]
    operand_dtype, sum_dtype, dtype = q.dtype, accumulation_dtype(q.dtype, softmax_dtype), v.dtype
    # A token may be in several clusters, and their gradients are added: widen first, so that the
    # sum is rounded once.
    q, k, v = (each.astype(sum_dtype) for each in (q, k, v))
    cluster_q, cluster_k, cluster_v = (
        _gather_members(x.swapaxes(1, 2), members)
        for x, members in ((q, query_members), (k, key_members), (v, key_members))
    )
    # `sqrt(H)` bounds the scores, so no maximum has to be agreed on between clusters. Dividing by
    # the number of shared clusters makes a key count once in total.
    scores = precise_einsum("BNECH,BNEDH->BNECD", cluster_q, cluster_k, operand_dtype, sum_dtype)
    scores = scores.astype(softmax_dtype) / bound
    exp_scores = jnp.exp(scores - bound) / _shared_cluster_counts(
        query_members, key_members, length
    ).astype(softmax_dtype)
    # A cluster near fewer than C tokens picks padding as well (affinity -inf); hidden here.
    key_is_token = _gather_members(
        jnp.broadcast_to(is_token[:, None, :, None], (*k.shape[:1], k.shape[2], length, 1)),
        key_members,
    )
    exp_scores = jnp.where(key_is_token[..., 0][..., None, :], exp_scores, 0)
    total = _sum_over_clusters(exp_scores.sum(-1, keepdims=True), query_members, length)
    has_keys = (total > 0) & is_token[:, None, :, None]
    # Divide the weights by their sum before the matmul with the values. If divided after it, the
    # gradients through numerator and denominator would not cancel, because the matmul rounds one.
    weights = (exp_scores / _gather_members(jnp.where(has_keys, total, 1), query_members)).astype(
        sum_dtype
    )
    cluster_y = precise_einsum("BNECD,BNEDH->BNECH", weights, cluster_v, operand_dtype, sum_dtype)
    y = jnp.where(has_keys, _sum_over_clusters(cluster_y, query_members, length), 0)
    return y.astype(dtype).swapaxes(1, 2)


def _shared_cluster_counts(of_queries: jax.Array, of_keys: jax.Array, length: int) -> jax.Array:
    """Return [B, N, E, C, C]: number of clusters that contain both the query and the key."""
    memberships = []
    for members in (of_queries, of_keys):
        membership = (
            membership_mask(members, length).swapaxes(2, 3).astype(jnp.float32)
        )  # [B, N, T, E]
        memberships.append(_gather_members(membership, members))
    # For each pair of members, count the clusters F that contain both.
    # Counts of clusters, as a matrix product: far below 2^24, to which float32 counts exactly.
    return jnp.einsum("BNECF,BNEDF->BNECD", *memberships)


def _gather_members(
    x: jax.Array, members: jax.Array
) -> jax.Array:  # [B, N, T, H] -> [B, N, E, C, H]
    flat = members.reshape(*members.shape[:2], -1, 1)
    return jnp.take_along_axis(x, flat, axis=2).reshape(*members.shape, x.shape[-1])


def _sum_over_clusters(x: jax.Array, members: jax.Array, length: int) -> jax.Array:
    """Sum the results of all clusters for each token: [B, N, E, C, H] -> [B, N, T, H]."""
    flat = members.reshape(*members.shape[:2], -1)

    def one(rows: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros((length, rows.shape[-1]), rows.dtype).at[at].add(rows)

    return jax.vmap(jax.vmap(one))(x.reshape(*flat.shape, -1), flat)

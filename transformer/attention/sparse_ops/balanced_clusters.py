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
    return jax.lax.top_k(affinity.swapaxes(2, 3), cluster_size)[1]


def membership_mask(
    members: jax.Array,  # [B, N, E, C]
    length: int,
) -> jax.Array:  # [B, N, E, T] booleans
    """Return a mask of the tokens that each cluster contains."""
    none = jnp.zeros((*members.shape[:3], length), bool)
    return jnp.put_along_axis(none, members, True, axis=-1, inplace=False)


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
    operands, sums, dtype = q.dtype, accumulation_dtype(q.dtype, softmax_dtype), v.dtype
    # A token is in several clusters, whose gradients are added: as float32, rounded once.
    q, k, v = (each.astype(sums) for each in (q, k, v))
    rows_q, rows_k, rows_v = (
        _rows(x.swapaxes(1, 2), chosen)
        for x, chosen in ((q, query_members), (k, key_members), (v, key_members))
    )
    scores = precise_einsum("BNECH,BNEDH->BNECD", rows_q, rows_k, operands, sums)
    scores = scores.astype(softmax_dtype) / bound
    raised = jnp.exp(scores - bound) / _together(query_members, key_members, length).astype(
        softmax_dtype
    )
    seen = _rows(
        jnp.broadcast_to(is_token[:, None, :, None], (*k.shape[:1], k.shape[2], length, 1)),
        key_members,
    )
    raised = jnp.where(seen[..., 0][..., None, :], raised, 0)
    total = _summed(raised.sum(-1, keepdims=True), query_members, length)
    some = (total > 0) & is_token[:, None, :, None]
    # Weights are divided by their sum before they meet the values: divided after, the gradients of
    # the two would not cancel, as one is rounded on its way through the product.
    weights = (raised / _rows(jnp.where(some, total, 1), query_members)).astype(sums)
    found = precise_einsum("BNECD,BNEDH->BNECH", weights, rows_v, operands, sums)
    y = jnp.where(some, _summed(found, query_members, length), 0)
    return y.astype(dtype).swapaxes(1, 2)


def _together(of_queries: jax.Array, of_keys: jax.Array, length: int) -> jax.Array:
    """Return [B, N, E, C, C]: number of clusters that contain both the query and the key."""
    both = []
    for chosen in (of_queries, of_keys):
        own = membership_mask(chosen, length).swapaxes(2, 3).astype(jnp.float32)  # [B, N, T, E]
        both.append(_rows(own, chosen))
    return jnp.einsum("BNECF,BNEDF->BNECD", *both)


def _rows(x: jax.Array, chosen: jax.Array) -> jax.Array:  # [B, N, T, H] -> [B, N, E, C, H]
    flat = chosen.reshape(*chosen.shape[:2], -1, 1)
    return jnp.take_along_axis(x, flat, axis=2).reshape(*chosen.shape, x.shape[-1])


def _summed(x: jax.Array, chosen: jax.Array, length: int) -> jax.Array:
    """Sum the results of all clusters for each token: [B, N, E, C, H] -> [B, N, T, H]."""
    flat = chosen.reshape(*chosen.shape[:2], -1)

    def one(rows: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros((length, rows.shape[-1]), rows.dtype).at[at].add(rows)

    return jax.vmap(jax.vmap(one))(x.reshape(*flat.shape, -1), flat)

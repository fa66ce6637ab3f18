"""Attention as the formula has it: all scores at once. The oracle of every other form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.dropout import dropout
from transformer.masks import Mask, dense
from transformer.positions.relative import RelativeTables
from transformer.precision import lowest

Meet = Callable[[jax.Array, jax.Array], jax.Array]
"""q [B, T, N, H], k [B, S, K, H] -> scores [B, N, T, S]."""

Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""Positions of queries [B or 1, T] and keys [B or 1, S] -> what scores gain [B or 1, N, T, S]."""


def products(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
) -> jax.Array:  # [B, N, T, S]
    """q k^T, where each G = N / K heads of queries share one of keys: as G T queries of it."""
    b, t, n, h = q.shape
    s, heads = k.shape[1:3]
    if n == heads:  # the same sum; without the merging of axes XLA's CPU compiler copies less
        return jnp.einsum("BTNH,BSNH->BNTS", q, k)
    grouped = q.reshape(b, t, heads, n // heads, h).transpose(0, 2, 3, 1, 4)
    merged = grouped.reshape(b, heads, -1, h)  # [B, K, G T, H]
    return jnp.einsum("BKTH,BSKH->BKTS", merged, k).reshape(b, n, t, s)


def attend_reference(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    *,
    scale: float,
    meet: Meet = products,
    bias: Bias | None = None,
    relative: RelativeTables | None = None,
    softmax_dtype: str = "float32",
    rate: float = 0.0,
    keys: jax.Array | None = None,  # [B]
) -> tuple[jax.Array, jax.Array]:  # [B, T, N, H of values], weights [B, N, T, S]
    """softmax(scale q k^T + bias under the mask) v (Vaswani et al. 2017, equation 1).

    A query that sees nothing gets zeros, and passes no gradient.
    """
    sizes = q.shape[1], k.shape[1]
    q = q * scale
    scores = meet(q, k)
    if relative is not None:
        scores = scores + relative.scores(q, *mask.places(*sizes))
    scores = scores.astype(softmax_dtype)
    if bias is not None:
        scores = scores + bias(*mask.places(*sizes)).astype(softmax_dtype)
    seen = dense(mask, *sizes)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, lowest(scores.dtype)), axis=-1)
    if mask.rows_may_be_empty(*sizes):
        weights = jnp.where(seen.any(-1, keepdims=True), weights, 0)
    dropped = dropout(weights, rate, keys).astype(v.dtype)
    y = _look_up(dropped, v)
    if relative is not None:
        y = y + relative.look_up(dropped, *mask.places(*sizes))
    return y, weights


def _look_up(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H]
) -> jax.Array:  # [B, T, N, H]
    """The average of the values under the weights."""
    b, n, t, s = weights.shape
    heads = v.shape[2]
    if n == heads:
        return jnp.einsum("BNTS,BSNH->BTNH", weights, v)
    merged = weights.reshape(b, heads, -1, s)  # [B, K, G T, S]
    y = jnp.einsum("BKTS,BSKH->BKTH", merged, v).reshape(b, n, t, -1)
    return y.swapaxes(1, 2)

"""Merging of partial attention: one softmax over several sets of keys; sharded heads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from transformer.attention.backends.blockwise import PartialAttention


def merge_partials(partials: Sequence[PartialAttention]) -> PartialAttention:
    """Return attention over the union of disjoint sets of keys.

    A query without a visible key in any of them gets zeros. The result has the dtype of the first
    `y`; partials of `ScoreSpec.widen` arrays are not rounded.
    """
    # The softmax over a union of sets is one over the sets, by their lse, times one within each: y
    # = sum over sets of exp(lse_set) y_set / sum over sets of exp(lse_set).
    lse = jnp.stack([partial.lse for partial in partials])  # [partials, B, N, T]
    maximum = lse.max(0)
    # The maximum cancels in the result, so no gradient has to pass through it.
    maximum = jax.lax.stop_gradient(jnp.where(jnp.isfinite(maximum), maximum, 0))
    shares = jnp.exp(lse - maximum[None])
    total = shares.sum(0)
    # Without a visible key all lse are -inf, and so all shares 0: divide by 1 instead of 0.
    is_nonempty = total > 0
    safe_total = jnp.where(is_nonempty, total, 1)
    shares = shares / safe_total[None]
    y = sum(
        (
            partial.y * share.swapaxes(1, 2)[..., None]
            for partial, share in zip(partials, shares, strict=True)
        ),
        start=jnp.zeros((), shares.dtype),
    )
    merged_lse = jnp.where(is_nonempty, jnp.log(safe_total) + maximum, -jnp.inf)
    return PartialAttention(y.astype(partials[0].y.dtype), merged_lse)


def repeat_kv_for_shards(
    x: jax.Array,  # [B, S, K, H]
    num_shards: int,  # of the query heads
) -> jax.Array:  # [B, S, K or num_shards, H]
    """Copy key or value heads that several devices share, one copy per device.

    Nothing changes if the devices divide K, or if neither divides the other.
    """
    num_kv_heads = x.shape[2]
    if num_kv_heads % num_shards == 0 or num_shards % num_kv_heads:
        return x
    return jnp.repeat(x, num_shards // num_kv_heads, axis=2)

"""Merging of partial attention: one softmax over several sets of keys; wide operands for it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from transformer.attention.attend import ScoreSpec
from transformer.attention.backends.blockwise import PartialAttention
from transformer.layers.precise_einsum import accumulation_dtype


def widen(
    score_spec: ScoreSpec,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
) -> tuple[ScoreSpec, tuple[jax.Array, jax.Array, jax.Array]]:
    """Return a spec and arrays whose results and gradients are not rounded.

    The arrays are cast to the dtype of sums, and the spec still rounds the operands of products to
    their old dtype. So several results can be merged, and gradients added, and rounded once.
    """
    operand_dtype = score_spec.operand_dtype_of(q)
    dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    wide = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    return score_spec._replace(operand_dtype=operand_dtype), wide


def merge_partials(partials: Sequence[PartialAttention]) -> PartialAttention:
    """Return attention over the union of disjoint sets of keys.

    A query without a visible key in any of them gets zeros. The result has the dtype of the first
    `y`; partials of arrays from `widen` are not rounded.
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

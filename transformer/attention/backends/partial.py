"""Attention over some of the keys: merged with the rest, with sinks, and on several devices."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.attention.reference import ScoreSpec
from transformer.layers.precise_einsum import accumulation_dtype


class PartialAttention(NamedTuple):
    """Attention over some of the keys, with what is needed to merge it with the rest."""

    y: Float[Array, "B T N Hv"]
    lse: Float[Array, "B N T"]  # log of the sum of exp(score); -inf: no visible key


def widen(
    score_spec: ScoreSpec,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
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
    # A share is [B, N, T] and y is [B, T, N, H]. The sum has the wide dtype of the shares.
    y = sum(
        (
            partial.y * weight.swapaxes(1, 2)[..., None]
            for partial, weight in zip(partials, shares, strict=True)
        ),
        start=jnp.zeros((), shares.dtype),
    )
    merged_lse = jnp.where(is_nonempty, jnp.log(safe_total) + maximum, -jnp.inf)
    return PartialAttention(y.astype(partials[0].y.dtype), merged_lse)


def repeat_kv_for_shards(
    x: Float[Array, "B S K H"],
    num_shards: int,  # of the query heads
) -> Float[Array, "B S kv_heads H"]:
    """Copy key or value heads that several devices share, one copy per device.

    Nothing changes if the devices divide K, or if neither divides the other.
    """
    num_kv_heads = x.shape[2]
    if num_kv_heads % num_shards == 0 or num_shards % num_kv_heads:
        return x
    # `repeat`, not `tile`: the copies of a head are neighbors, on the devices of its query heads.
    return jnp.repeat(x, num_shards // num_kv_heads, axis=2)


def add_sinks(
    attention: PartialAttention,
    sink_logits: Float[Array, "N"],
) -> PartialAttention:
    """Add the sinks to attention that is already normalized.

    With the sink's score s, each softmax sum grows from exp(lse) to exp(lse) + exp(s), so the
    result shrinks by exp(lse - logaddexp(lse, s)).
    """
    lse = jnp.logaddexp(attention.lse, sink_logits.astype(attention.lse.dtype)[None, :, None])
    fraction = jnp.exp(attention.lse - lse).swapaxes(1, 2)[..., None]
    return attention._replace(y=(attention.y * fraction).astype(attention.y.dtype), lse=lse)

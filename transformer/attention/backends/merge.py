"""One softmax over several sets of keys, each looked at by itself.

Attention sinks: each head learns the score of a key that has no value.

Heads of keys and values that are cut for devices.

`attend(q, k, v, mask)`: softmax attention without weights of its own, in several forms.

All forms compute the same numbers; they differ in speed and memory. Each has its file.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.backends.blockwise import PartialAttention
from transformer.context import ModelContext
from transformer.layers.params import declare_weight


def merge_partials(partials: Sequence[PartialAttention]) -> PartialAttention:
    """What attention over the union of disjoint sets of keys would have found.

    A query that sees nothing in any of them has zeros. Parts in 16 bits are merged in the dtype of
    their logarithms, and the result is rounded to 16 bits again; parts of `Scoring.widen` arrays
    are rounded nowhere.
    """
    lse = jnp.stack([part.lse for part in partials])  # [parts, B, N, T]
    largest = lse.max(0)
    # It cancels, so no gradient goes through it.
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    shares = jnp.exp(lse - largest[None])
    total = shares.sum(0)
    some = total > 0
    shares = shares / jnp.where(some, total, 1)[None]
    y = sum(
        (
            part.y * share.swapaxes(1, 2)[..., None]
            for part, share in zip(partials, shares, strict=True)
        ),
        start=jnp.zeros((), shares.dtype),
    )
    whole = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + largest, -jnp.inf)
    return PartialAttention(y.astype(partials[0].y.dtype), whole)


def add_sinks(
    attention: PartialAttention,
    sink_logits: jax.Array,  # [N]
) -> PartialAttention:
    """As if there were one more key of this score, whose value is zero."""
    lse = jnp.logaddexp(attention.lse, sink_logits.astype(attention.lse.dtype)[None, :, None])
    share = jnp.exp(attention.lse - lse).swapaxes(1, 2)[..., None]
    return PartialAttention((attention.y * share).astype(attention.y.dtype), lse)


def declare_sink_logits(
    module: nn.Module, num_heads: int, context: ModelContext
) -> jax.Array:  # [N]
    """Declares them. They start at zero, as a key that each query scores zero."""
    zeros, dtype = nn.initializers.zeros, context.precision.parameters
    return declare_weight(module, "sinks", outputs={"heads": num_heads}, init=zeros, dtype=dtype)


def repeat_kv_for_shards(
    x: jax.Array, num_shards: int
) -> jax.Array:  # [B, T, K, H] -> [B, T, K or parts, H]
    """Keys or values such that K divides into as many parts as the heads of the queries.

    Heads that several parts share are copied, one for each of them.
    """
    heads = x.shape[2]
    return (
        x
        if heads % num_shards == 0 or num_shards % heads
        else jnp.repeat(x, num_shards // heads, axis=2)
    )

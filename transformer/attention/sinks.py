"""Attention sinks: one more key per head, with a learned score and a value of zero.

A query that matches no key can put its weight there (Agarwal et al. 2025, section 2.2).
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.context import ModelContext
from transformer.layers.basic import declare_weight

if TYPE_CHECKING:  # blockwise.py imports attend.py, which imports this module
    from transformer.attention.backends.tiling import PartialAttention


def declare_sink_logits(
    module: nn.Module, num_heads: int, context: ModelContext
) -> jax.Array:  # [N]
    """Declare the logits of attention sinks, initially 0: the score of a key orthogonal to q."""
    zeros, dtype = nn.initializers.zeros, context.precision.parameters
    return declare_weight(module, "sinks", outputs={"heads": num_heads}, init=zeros, dtype=dtype)


def softmax_with_sinks(
    scores: jax.Array,  # [B, N, T, S]
    sink_logits: jax.Array,  # [N]
) -> jax.Array:  # [B, N, T, S]
    """Return the softmax over the scores and the sink, without the sink's own weight."""
    column = sink_logits.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def add_sinks(
    attention: "PartialAttention",
    sink_logits: jax.Array,  # [N]
) -> "PartialAttention":
    """Add the sinks to attention that is already normalized.

    With the sink's score s, each softmax sum grows from exp(lse) to exp(lse) + exp(s), so the
    result shrinks by exp(lse - logaddexp(lse, s)).
    """
    lse = jnp.logaddexp(attention.lse, sink_logits.astype(attention.lse.dtype)[None, :, None])
    share = jnp.exp(attention.lse - lse).swapaxes(1, 2)[..., None]
    return attention._replace(y=(attention.y * share).astype(attention.y.dtype), lse=lse)

"""Attention sinks: each head learns the score of a key that has no value."""

import jax
from flax import linen as nn

from transformer.shared import ModelContext
from transformer.weights import declare_weight


def declare_sink_logits(
    module: nn.Module, num_heads: int, context: ModelContext
) -> jax.Array:  # [N]
    """Declares them. They start at zero, as a key that each query scores zero."""
    zeros, dtype = nn.initializers.zeros, context.precision.parameters
    return declare_weight(module, "sinks", outputs={"heads": num_heads}, init=zeros, dtype=dtype)

"""Attention sinks: each head learns the score of a key that has no value."""

import jax
from flax import linen as nn

from transformer.shared import Shared
from transformer.weights import weight


def sink_scores(module: nn.Module, heads: int, shared: Shared) -> jax.Array:  # [N]
    """Declares them. They start at zero, as a key that each query scores zero."""
    zeros, dtype = nn.initializers.zeros, shared.precision.parameters
    return weight(module, "sinks", outputs={"heads": heads}, init=zeros, dtype=dtype)

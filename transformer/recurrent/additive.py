"""The score of an MLP between a state and each vector of a memory (Bahdanau et al. 2015, A.1.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.linear import linear
from transformer.recurrent.cells import BY_FAN_IN, inner_weight, times
from transformer.shared import Shared


class Additive(NamedTuple):
    """score = v . tanh(W state + U memory)."""

    query: jax.Array  # [H, A] W
    vector: jax.Array  # [A] v

    def scores(
        self,
        state: jax.Array,  # [B, H]
        keys: jax.Array,  # [B, S, A] U memory
    ) -> jax.Array:  # [B, S]
        hidden = jnp.tanh(times(state, self.query)[:, None] + keys)
        return jnp.einsum("BSA,A->BS", hidden, self.vector)


def additive(
    module: nn.Module,
    state: int,  # H
    hidden: int,  # A
    shared: Shared,
) -> Additive:
    """Declares W and v."""
    score, init = {"score": hidden}, BY_FAN_IN.matrix({"score": hidden})
    query = inner_weight(module, "score_query", {"state": state}, score, shared)
    return Additive(query, inner_weight(module, "score_vector", {}, score, shared, init))


def additive_keys(
    module: nn.Module,
    memory: jax.Array,  # [B, S, D]
    hidden: int,  # A
    shared: Shared,
) -> jax.Array:  # [B, S, A]
    """Declares U; what of the memory meets the states."""
    embed, score = {"embed": memory.shape[-1]}, {"score": hidden}
    return linear(module, "score_key", memory, embed, score, shared, bias=False)

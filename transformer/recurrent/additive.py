"""The score of an MLP between a state and each vector of a memory (Bahdanau et al. 2015, A.1.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.linear import apply_linear
from transformer.recurrent.cells import RECURRENT_INIT, apply_matrix, recurrent_weight
from transformer.shared import ModelContext


class AdditiveScorer(NamedTuple):
    """score = v . tanh(W state + U memory)."""

    query_matrix: jax.Array  # [H, A] W
    vector: jax.Array  # [A] v

    def scores(
        self,
        state: jax.Array,  # [B, H]
        keys: jax.Array,  # [B, S, A] U memory
    ) -> jax.Array:  # [B, S]
        hidden = jnp.tanh(apply_matrix(state, self.query_matrix)[:, None] + keys)
        return jnp.einsum("BSA,A->BS", hidden, self.vector)


def additive_scorer(
    module: nn.Module,
    state_size: int,  # H
    score_size: int,  # A
    context: ModelContext,
) -> AdditiveScorer:
    """Declares W and v."""
    score, init = {"score": score_size}, RECURRENT_INIT.matrix_initializer({"score": score_size})
    query = recurrent_weight(module, "score_query", {"state": state_size}, score, context)
    return AdditiveScorer(query, recurrent_weight(module, "score_vector", {}, score, context, init))


def project_additive_keys(
    module: nn.Module,
    memory: jax.Array,  # [B, S, D]
    score_size: int,  # A
    context: ModelContext,
) -> jax.Array:  # [B, S, A]
    """Declares U; what of the memory meets the states."""
    embed, score = {"embed": memory.shape[-1]}, {"score": score_size}
    return apply_linear(module, "score_key", memory, embed, score, context, bias=False)

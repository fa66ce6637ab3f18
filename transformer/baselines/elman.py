"""Simple recurrent network (Elman 1990), optionally with a deep transition."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.base import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.sparse_ops.document_boundaries import document_boundaries
from transformer.baselines.cells import apply_matrix, recurrent_weight, scan_cell
from transformer.baselines.config import ElmanConfig
from transformer.layers.basic import apply_linear
from transformer.registry import MIXERS


class ElmanState(struct.PyTreeNode):
    """Recurrent state, which is also the cache."""

    hidden: jax.Array  # [B, H]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        hidden_size: int,  # H
        dtype: Any,  # the compute dtype
    ) -> "ElmanState":
        """Return the state before the first token."""
        return cls(jnp.zeros((batch_size, hidden_size), dtype))


class ElmanRNN(Mixer):
    """Recurrent state at each token."""

    config: ElmanConfig

    @staticmethod
    def abilities(config: ElmanConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: ElmanConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: ElmanConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> ElmanState:
        width = self.config.hidden_size or self.context.d_model
        return ElmanState.empty(batch, width, self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.hidden_size or context.d_model
        embed, hidden, state = {"embed": context.d_model}, {"hidden": width}, {"state": width}
        input_terms = apply_linear(self, "input", x, embed, hidden, context, bias=True)
        recurrent = recurrent_weight(self, "recurrent", state, hidden, context)
        zeros = nn.initializers.zeros
        transition = [
            (
                recurrent_weight(self, f"deeper_{layer}", state, hidden, context),
                recurrent_weight(self, f"deeper_{layer}_bias", {}, hidden, context, zeros),
            )
            for layer in range(1, config.transition_depth)
        ]

        def cell(state: ElmanState, input_term: jax.Array) -> tuple[ElmanState, jax.Array]:
            h = jnp.tanh(input_term + apply_matrix(state.hidden, recurrent))
            for matrix, bias in transition:
                h = jnp.tanh(apply_matrix(h, matrix) + bias[None])
            return ElmanState(h), h

        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        before = inputs.cache if cached else self.init_cache(*x.shape[:2])
        after, y = scan_cell(cell, before, input_terms, boundaries)
        if width != context.d_model:
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, after if cached else None, {})


MIXERS[ElmanConfig.kind] = ElmanRNN

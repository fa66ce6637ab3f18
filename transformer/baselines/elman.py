"""Simple recurrent network (Elman 1990), optionally with a deep transition."""

import jax
import jax.numpy as jnp
from flax import linen as nn

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
from transformer.baselines.cells import (
    apply_matrix,
    document_boundaries,
    recurrent_weight,
    scan_cell,
)
from transformer.baselines.config import ElmanConfig
from transformer.layers.basic import apply_linear
from transformer.registry import MIXERS


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
    def init_cache(self, batch: int, length: int) -> jax.Array:  # [B, H]
        width = self.config.hidden_size or self.context.d_model
        return jnp.zeros((batch, width), self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.hidden_size or context.d_model
        embed, hidden, state = {"embed": context.d_model}, {"hidden": width}, {"state": width}
        driven = apply_linear(self, "input", x, embed, hidden, context, bias=True)
        recurrent = recurrent_weight(self, "recurrent", state, hidden, context)
        zeros = nn.initializers.zeros
        deeper = [
            (
                recurrent_weight(self, f"deeper_{layer}", state, hidden, context),
                recurrent_weight(self, f"deeper_{layer}_bias", {}, hidden, context, zeros),
            )
            for layer in range(1, config.transition_depth)
        ]

        def cell(h: jax.Array, driven: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(driven + apply_matrix(h, recurrent))
            for matrix, bias in deeper:
                h = jnp.tanh(apply_matrix(h, matrix) + bias[None])
            return h, h

        line = document_boundaries(inputs.mask, inputs.positions, cached=inputs.cache is not None)
        before = self.init_cache(x.shape[0], 0) if inputs.cache is None else inputs.cache
        after, y = scan_cell(cell, before, driven, line)
        if width != context.d_model:
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, None if inputs.cache is None else after, {})


MIXERS[ElmanConfig.kind] = ElmanRNN

"""The simple recurrent network (Elman 1990), with one layer from state to state or several."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.linear import linear
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.cells import inner_weight, times
from transformer.recurrent.configs import ElmanConfig as ElmanConfig
from transformer.recurrent.scan import recur, timeline
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights


class Elman(Mixer):
    """The state at each token."""

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
        width = self.config.hidden or self.shared.width
        return jnp.zeros((batch, width), self.shared.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, inputs.mask)
        width = config.hidden or shared.width
        embed, hidden, state = {"embed": shared.width}, {"hidden": width}, {"state": width}
        driven = linear(self, "input", x, embed, hidden, shared, bias=True)
        recurrent = inner_weight(self, "recurrent", state, hidden, shared)
        zeros = nn.initializers.zeros
        deeper = [
            (
                inner_weight(self, f"deeper_{layer}", state, hidden, shared),
                inner_weight(self, f"deeper_{layer}_bias", {}, hidden, shared, zeros),
            )
            for layer in range(1, config.depth)
        ]

        def cell(h: jax.Array, driven: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(driven + times(h, recurrent))
            for matrix, bias in deeper:
                h = jnp.tanh(times(h, matrix) + bias[None])
            return h, h

        line = timeline(inputs.mask, inputs.positions, cached=inputs.cache is not None)
        before = self.init_cache(len(x), 0) if inputs.cache is None else inputs.cache
        after, y = recur(cell, before, driven, line)
        if width != shared.width:
            y = linear(self, "output", y, hidden, embed, shared, bias=True, residual=True)
        return MixerOutput(y, None if inputs.cache is None else after, {})


MIXERS[ElmanConfig.kind] = Elman

"""The decoder of Google's neural machine translation (Wu et al. 2016, section 3)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.dropout import dropout, fold
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.additive import additive, additive_keys
from transformer.recurrent.cells import (
    LSTMLayer,
    LSTMState,
    inner_weight,
    lstm_gates,
    lstm_step,
    times,
)
from transformer.recurrent.configs import GNMTDecoderConfig as GNMTDecoderConfig
from transformer.recurrent.memory import (
    AttentionalCache,
    align,
    looked_at,
    memory_score_flops,
    no_cache_without_memory,
    vectors,
)
from transformer.recurrent.scan import Timeline, recur, timeline


class GNMTCache(struct.PyTreeNode):
    """The state of each layer, and the memory."""

    first: AttentionalCache
    above: tuple[LSTMState, ...]


class GNMTDecoder(Mixer):
    """The top layer's result. All layers are one mixer: they share what the first has looked at."""

    config: GNMTDecoderConfig

    @staticmethod
    def abilities(config: GNMTDecoderConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: GNMTDecoderConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: GNMTDecoderConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.widths(width)[1], width, length)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> GNMTCache:
        raise no_cache_without_memory(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> GNMTCache:
        shared, (width, score) = self.shared, self.config.widths(self.shared.width)
        zeros = lambda last: jnp.zeros((batch, length, last), shared.precision.compute)  # noqa: E731
        states = tuple(LSTMState.zeros(batch, width, shared) for _ in range(self.config.layers))
        return GNMTCache(AttentionalCache(states[0], zeros(score), zeros(width)), states[1:])

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.shared
        line = timeline(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        size = vectors(
            config.kind, inputs.memory, None if inputs.cache is None else inputs.cache.first
        ).shape[1]
        states = inputs.cache or self.init_memory_cache(len(x), size)
        first = states.first
        if inputs.memory is not None:
            looks = additive_keys(self, inputs.memory, config.widths(shared.width)[1], shared)
            first = AttentionalCache(first.state, looks, inputs.memory)
        read = dropout(x, config.dropout, fold(inputs.dropout_rngs, 0))
        seen = looked_at(inputs.mask, x.shape[1], size)
        state, (x, contexts, weights) = self.look(read, seen, first, line)
        above = []
        for layer in range(1, config.layers):
            read = dropout(x, config.dropout, fold(inputs.dropout_rngs, layer))
            read = jnp.concatenate([read, contexts], axis=-1)
            lstm = LSTMLayer(shared.width, shared, name=f"layer_{layer}")
            after, y = lstm(read, line, states.above[layer - 1])
            above.append(after)
            x = y if layer == 1 else x + y
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        kept = GNMTCache(first.replace(state=state), tuple(above))
        return MixerOutput(x, None if inputs.cache is None else kept, aux)

    def look(
        self,
        x: jax.Array,  # [B, T, D]
        seen: jax.Array,  # [B or 1, T, S]
        first: AttentionalCache,
        line: Timeline | None,
    ) -> tuple[LSTMState, tuple[jax.Array, jax.Array, jax.Array]]:
        """The first layer: its results [B, T, D], contexts [B, T, D] and weights [B, T, S]."""
        shared, (width, score) = self.shared, self.config.widths(self.shared.width)
        embed, gates = {"embed": width}, {"gates": 4, "hidden": width}
        driven, recurrent = lstm_gates(self, x, embed, width, shared)
        of_context = inner_weight(self, "context", embed, gates, shared)
        mlp = additive(self, width, score, shared)

        def cell(state: LSTMState, now: tuple[jax.Array, jax.Array]) -> tuple[LSTMState, Any]:
            driven, seen = now
            scores = mlp.scores(state.hidden, first.keys)
            context, weights = align(scores, seen, first.values, shared.precision.softmax)
            gates = driven + times(state.hidden, recurrent) + times(context, of_context)
            state = lstm_step(state, gates)
            return state, (state.hidden, context, weights)

        return recur(cell, first.state, (driven, seen), line)


MIXERS[GNMTDecoderConfig.kind] = GNMTDecoder

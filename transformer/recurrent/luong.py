"""The decoder with global attention and input feeding (Luong, Pham and Manning 2015)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.linear import linear
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.additive import additive, additive_keys
from transformer.recurrent.cells import LSTMState, inner_weight, lstm_gates, lstm_step, times
from transformer.recurrent.configs import LuongConfig as LuongConfig
from transformer.recurrent.memory import (
    AttentionalCache,
    align,
    at_first,
    last_seen,
    looked_at,
    lstm_from,
    memory_score_flops,
    no_cache_without_memory,
    vectors,
)
from transformer.recurrent.scan import Cell, recur, timeline
from transformer.scores import AdditiveScore, DotScore

Scores = Callable[[jax.Array, jax.Array], jax.Array]
"""(state [B, H], keys [B, S, A]) -> [B, S]."""


class LuongState(struct.PyTreeNode):
    """The state of the LSTM, and what it is fed beside the next token."""

    lstm: LSTMState
    attentional: jax.Array  # [B, D] h~


class Luong(Mixer):
    """The attentional hidden state h~ of each token."""

    config: LuongConfig

    @staticmethod
    def abilities(config: LuongConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: LuongConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LuongConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.widths(width)[1], width, length)

    @property
    def widths(self) -> tuple[int, int]:
        """H, A."""
        return self.config.widths(self.shared.width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> AttentionalCache:
        raise no_cache_without_memory(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> AttentionalCache:
        shared, (hidden, score) = self.shared, self.widths
        zeros = lambda *shape: jnp.zeros(shape, shared.precision.compute)  # noqa: E731
        state = LuongState(LSTMState.zeros(batch, hidden, shared), zeros(batch, shared.width))
        return AttentionalCache(
            state, zeros(batch, length, score), zeros(batch, length, shared.width)
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        shared, hidden = self.shared, self.widths[0]
        line = timeline(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        seen = looked_at(
            inputs.mask, x.shape[1], vectors(self.config.kind, inputs.memory, inputs.cache).shape[1]
        )
        seeds, now = None, inputs.cache
        if inputs.memory is not None:
            begun = lstm_from(self, last_seen(inputs.memory, seen), hidden, shared)
            seeds = LuongState(begun, jnp.zeros_like(x))
            state = at_first(seeds) if inputs.cache is None else inputs.cache.state
            now = AttentionalCache(state, self.looks(inputs.memory), inputs.memory)
        assert now is not None  # there is a memory or a cache
        gates, recurrent = lstm_gates(self, x, {"embed": shared.width}, hidden, shared)
        cell = self.cell(now.keys, now.values, recurrent)
        after, (y, weights) = recur(cell, now.state, (gates, seen), line, seeds)
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if inputs.cache is None else now.replace(state=after), aux)

    def cell(
        self,
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
        recurrent: jax.Array,  # [H, 4, H]
    ) -> Cell:
        """Declares the weights inside the loop."""
        shared, hidden = self.shared, self.widths[0]
        embed = {"embed": shared.width}
        feed = inner_weight(self, "feed", embed, {"gates": 4, "hidden": hidden}, shared)
        both = {"both": shared.width + hidden}
        combine = inner_weight(self, "combine", both, {"hidden": shared.width}, shared)
        scores = self.scores()

        def step(
            state: LuongState,
            now: tuple[jax.Array, jax.Array],  # [B, 4, H], [B or 1, S]
        ) -> tuple[LuongState, tuple[jax.Array, jax.Array]]:
            gates, seen = now
            gates = gates + times(state.lstm.hidden, recurrent) + times(state.attentional, feed)
            lstm = lstm_step(state.lstm, gates)
            found = scores(lstm.hidden, keys)
            context, weights = align(found, seen, values, shared.precision.softmax)
            together = jnp.concatenate([context, lstm.hidden], axis=-1)
            attentional = jnp.tanh(times(together, combine))
            return LuongState(lstm, attentional), (attentional, weights)

        return step

    def looks(self, memory: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, A]
        """What of the memory meets the states."""
        if isinstance(self.config.score, DotScore):
            return memory
        if isinstance(self.config.score, AdditiveScore):
            return additive_keys(self, memory, self.widths[1], self.shared)
        embed, score = {"embed": self.shared.width}, {"score": self.widths[1]}
        return linear(self, "score_key", memory, embed, score, self.shared, bias=False)

    def scores(self) -> Scores:
        """How states and keys meet: as products, or through an MLP, of which it declares W, v."""
        if isinstance(self.config.score, AdditiveScore):
            return additive(self, *self.widths, self.shared).scores
        return lambda state, keys: jnp.einsum("BA,BSA->BS", state, keys)


MIXERS[LuongConfig.kind] = Luong

"""The decoder that learns to align (Bahdanau, Cho and Bengio 2015, section 3 and appendix A)."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.linear import linear
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.additive import additive, additive_keys
from transformer.recurrent.cells import inner_weight, times
from transformer.recurrent.configs import BahdanauConfig as BahdanauConfig
from transformer.recurrent.memory import (
    AttentionalCache,
    align,
    at_first,
    first_seen,
    looked_at,
    memory_score_flops,
    no_cache_without_memory,
    vectors,
)
from transformer.recurrent.scan import Cell, recur, timeline

GATES = ("update", "reset", "candidate")


class Bahdanau(Mixer):
    """The deep output of each token: of the state before it, itself and what it looked at."""

    config: BahdanauConfig

    @staticmethod
    def abilities(config: BahdanauConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: BahdanauConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: BahdanauConfig, width: int, length: int) -> ScoreFlops:
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
        hidden, score = self.widths
        zeros = lambda *shape: jnp.zeros(shape, self.shared.precision.compute)  # noqa: E731
        memory = zeros(batch, length, self.shared.width)
        return AttentionalCache(zeros(batch, hidden), zeros(batch, length, score), memory)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        shared, (hidden, score) = self.shared, self.widths
        line = timeline(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        seen = looked_at(
            inputs.mask, x.shape[1], vectors(self.config.kind, inputs.memory, inputs.cache).shape[1]
        )
        embed, seeds, now = {"embed": shared.width}, None, inputs.cache
        if inputs.memory is not None:
            first, state = first_seen(inputs.memory, seen), {"hidden": hidden}
            seeds = jnp.tanh(linear(self, "first", first, embed, state, shared, bias=True))
            before = at_first(seeds) if inputs.cache is None else inputs.cache.state
            now = AttentionalCache(
                before, additive_keys(self, inputs.memory, score, shared), inputs.memory
            )
        assert now is not None  # there is a memory or a cache
        gates = {"gates": len(GATES), "hidden": hidden}
        driven = linear(self, "input", x, embed, gates, shared, bias=True)
        cell = self.cell(now.keys, now.values)
        after, (states, contexts, weights) = recur(cell, now.state, (driven, seen), line, seeds)
        y = self.deep_output(states, x, contexts)
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if inputs.cache is None else now.replace(state=after), aux)

    def cell(
        self,
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
    ) -> Cell:
        """Declares the weights inside the loop."""
        shared, (hidden, score) = self.shared, self.widths
        mlp = additive(self, hidden, score, shared)
        state, embed, out = {"state": hidden}, {"embed": shared.width}, {"hidden": hidden}
        gates = inner_weight(self, "gates", state, {"gates": 2, **out}, shared)
        candidate = inner_weight(self, "candidate", state, out, shared)
        context = inner_weight(self, "context", embed, {"gates": len(GATES), **out}, shared)

        def step(
            s: jax.Array,  # [B, H]
            now: tuple[jax.Array, jax.Array],  # [B, 3, H], [B or 1, S]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
            driven, seen = now
            c, weights = align(mlp.scores(s, keys), seen, values, shared.precision.softmax)
            driven = driven + times(c, context)
            both = jax.nn.sigmoid(driven[:, :2] + times(s, gates))
            z, r = both[:, 0], both[:, 1]
            new = (1 - z) * s + z * jnp.tanh(driven[:, 2] + times(r * s, candidate))
            return new, (s, c, weights)

        return step

    def deep_output(
        self,
        states: jax.Array,  # [B, T, H] before each token
        x: jax.Array,  # [B, T, D]
        contexts: jax.Array,  # [B, T, D]
    ) -> jax.Array:  # [B, T, D]
        """The larger of two linear maps of all three (a maxout layer, Goodfellow et al. 2013)."""
        width = self.shared.width
        pieces, embed = {"pieces": 2, "hidden": width}, {"embed": width}
        add = functools.partial(linear, self, outputs=pieces, shared=self.shared, residual=True)
        of_state = add("output_state", states, {"state": states.shape[-1]}, bias=True)
        of_token = add("output_token", x, embed, bias=False)
        of_context = add("output_context", contexts, embed, bias=False)
        return jnp.max(of_state + of_token + of_context, axis=2)


MIXERS[BahdanauConfig.kind] = Bahdanau

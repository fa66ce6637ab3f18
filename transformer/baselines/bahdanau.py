"""GRU decoder with additive attention (Bahdanau, Cho and Bengio 2015, section 3, appendix A)."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.masks import Mask
from transformer.baselines.cells import (
    RecurrentCell,
    apply_matrix,
    document_boundaries,
    recurrent_weight,
    scan_cell,
)
from transformer.baselines.config import BahdanauConfig
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_scorer,
    attend_with_scores,
    first_token_state,
    first_visible,
    memory_mask,
    memory_score_flops,
    memory_vectors,
    needs_memory_cache_error,
    project_additive_keys,
)
from transformer.layers.basic import apply_linear
from transformer.registry import MIXERS

GRU_GATES = ("update", "reset", "candidate")


class BahdanauDecoder(Mixer):
    """Deep output of each token: from the previous state, the token and the context."""

    config: BahdanauConfig

    @staticmethod
    def abilities(config: BahdanauConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: BahdanauConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: BahdanauConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.resolved_sizes(width)[1], width, length)

    @property
    def sizes(self) -> tuple[int, int]:
        """H and A."""
        return self.config.resolved_sizes(self.context.d_model)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        raise needs_memory_cache_error(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        hidden, score = self.sizes
        zeros = lambda *shape: jnp.zeros(shape, self.context.precision.compute)  # noqa: E731
        memory = zeros(batch, length, self.context.d_model)
        return MemoryAttentionCache(zeros(batch, hidden), zeros(batch, length, score), memory)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        model_context, (hidden, score) = self.context, self.sizes
        line = document_boundaries(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        seen = memory_mask(
            inputs.mask,
            x.shape[1],
            memory_vectors(self.config.kind, inputs.memory, inputs.cache).shape[1],
        )
        embed, seeds, now = {"embed": model_context.d_model}, None, inputs.cache
        if inputs.memory is not None:
            first, state = first_visible(inputs.memory, seen), {"hidden": hidden}
            seeds = jnp.tanh(
                apply_linear(self, "first", first, embed, state, model_context, bias=True)
            )
            before = first_token_state(seeds) if inputs.cache is None else inputs.cache.state
            now = MemoryAttentionCache(
                before,
                project_additive_keys(self, inputs.memory, score, model_context),
                inputs.memory,
            )
        assert now is not None  # there is a memory or a cache
        gates = {"gates": len(GRU_GATES), "hidden": hidden}
        driven = apply_linear(self, "input", x, embed, gates, model_context, bias=True)
        cell = self.make_cell(now.keys, now.values)
        after, (states, contexts, weights) = scan_cell(cell, now.state, (driven, seen), line, seeds)
        y = self.deep_output(states, x, contexts)
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if inputs.cache is None else now.replace(state=after), aux)

    def make_cell(
        self,
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
    ) -> RecurrentCell:
        """Declare the weights of the recurrent cell and return the cell."""
        model_context, (hidden, score) = self.context, self.sizes
        mlp = additive_scorer(self, hidden, score, model_context)
        state, embed, out = {"state": hidden}, {"embed": model_context.d_model}, {"hidden": hidden}
        gates = recurrent_weight(self, "gates", state, {"gates": 2, **out}, model_context)
        candidate = recurrent_weight(self, "candidate", state, out, model_context)
        context = recurrent_weight(
            self, "context", embed, {"gates": len(GRU_GATES), **out}, model_context
        )

        def step(
            s: jax.Array,  # [B, H]
            now: tuple[jax.Array, jax.Array],  # [B, 3, H], [B or 1, S]
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
            driven, seen = now
            c, weights = attend_with_scores(
                mlp.scores(s, keys), seen, values, model_context.precision.softmax
            )
            driven = driven + apply_matrix(c, context)
            both = jax.nn.sigmoid(driven[:, :2] + apply_matrix(s, gates))
            z, r = both[:, 0], both[:, 1]
            new = (1 - z) * s + z * jnp.tanh(driven[:, 2] + apply_matrix(r * s, candidate))
            return new, (s, c, weights)

        return step

    def deep_output(
        self,
        states: jax.Array,  # [B, T, H] before each token
        x: jax.Array,  # [B, T, D]
        contexts: jax.Array,  # [B, T, D]
    ) -> jax.Array:  # [B, T, D]
        """Return the maximum of two linear maps of all three (maxout, Goodfellow et al. 2013)."""
        width = self.context.d_model
        pieces, embed = {"pieces": 2, "hidden": width}, {"embed": width}
        add = functools.partial(
            apply_linear, self, outputs=pieces, context=self.context, residual=True
        )
        of_state = add("output_state", states, {"state": states.shape[-1]}, bias=True)
        of_token = add("output_token", x, embed, bias=False)
        of_context = add("output_context", contexts, embed, bias=False)
        return jnp.max(of_state + of_token + of_context, axis=2)


MIXERS[BahdanauConfig.kind] = BahdanauDecoder

"""LSTM decoder with global attention and input feeding (Luong, Pham and Manning 2015)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.config import AdditiveScore, DotScore
from transformer.attention.masks import Mask
from transformer.baselines.cells import (
    LSTMState,
    RecurrentCell,
    apply_matrix,
    document_boundaries,
    lstm_input_gates,
    lstm_step,
    recurrent_weight,
    scan_cell,
)
from transformer.baselines.config import LuongConfig
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_scorer,
    attend_with_scores,
    first_token_state,
    init_lstm_state,
    last_visible,
    memory_mask,
    memory_score_flops,
    memory_vectors,
    needs_memory_cache_error,
    project_additive_keys,
)
from transformer.layers.basic import apply_linear
from transformer.registry import MIXERS

MemoryScoreFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(state [B, H], keys [B, S, A]) -> scores [B, S]."""


class LuongState(struct.PyTreeNode):
    """State of the LSTM, and the vector that is fed to it with the next token."""

    lstm: LSTMState
    attentional_hidden: jax.Array  # [B, D] h~


class LuongDecoder(Mixer):
    """Attentional hidden state h~ of each token."""

    config: LuongConfig

    @staticmethod
    def abilities(config: LuongConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: LuongConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LuongConfig, width: int, length: int) -> ScoreFlops:
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
        model_context, (hidden, score) = self.context, self.sizes
        zeros = lambda *shape: jnp.zeros(shape, model_context.precision.compute)  # noqa: E731
        state = LuongState(
            LSTMState.zeros(batch, hidden, model_context), zeros(batch, model_context.d_model)
        )
        return MemoryAttentionCache(
            state, zeros(batch, length, score), zeros(batch, length, model_context.d_model)
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        model_context, hidden = self.context, self.sizes[0]
        line = document_boundaries(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        seen = memory_mask(
            inputs.mask,
            x.shape[1],
            memory_vectors(self.config.kind, inputs.memory, inputs.cache).shape[1],
        )
        seeds, now = None, inputs.cache
        if inputs.memory is not None:
            initial_lstm = init_lstm_state(
                self, last_visible(inputs.memory, seen), hidden, model_context
            )
            seeds = LuongState(initial_lstm, jnp.zeros_like(x))
            state = first_token_state(seeds) if inputs.cache is None else inputs.cache.state
            now = MemoryAttentionCache(
                state, self.project_memory_keys(inputs.memory), inputs.memory
            )
        assert now is not None  # there is a memory or a cache
        gates, recurrent = lstm_input_gates(
            self, x, {"embed": model_context.d_model}, hidden, model_context
        )
        cell = self.make_cell(now.keys, now.values, recurrent)
        after, (y, weights) = scan_cell(cell, now.state, (gates, seen), line, seeds)
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if inputs.cache is None else now.replace(state=after), aux)

    def make_cell(
        self,
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
        recurrent: jax.Array,  # [H, 4, H]
    ) -> RecurrentCell:
        """Declare the weights of the recurrent cell and return the cell."""
        model_context, hidden = self.context, self.sizes[0]
        embed = {"embed": model_context.d_model}
        feed = recurrent_weight(self, "feed", embed, {"gates": 4, "hidden": hidden}, model_context)
        both = {"both": model_context.d_model + hidden}
        combine = recurrent_weight(
            self, "combine", both, {"hidden": model_context.d_model}, model_context
        )
        scores = self.make_score_fn()

        def step(
            state: LuongState,
            now: tuple[jax.Array, jax.Array],  # [B, 4, H], [B or 1, S]
        ) -> tuple[LuongState, tuple[jax.Array, jax.Array]]:
            gates, seen = now
            gates = (
                gates
                + apply_matrix(state.lstm.hidden, recurrent)
                + apply_matrix(state.attentional_hidden, feed)
            )
            lstm = lstm_step(state.lstm, gates)
            found = scores(lstm.hidden, keys)
            context, weights = attend_with_scores(
                found, seen, values, model_context.precision.softmax
            )
            together = jnp.concatenate([context, lstm.hidden], axis=-1)
            attentional = jnp.tanh(apply_matrix(together, combine))
            return LuongState(lstm, attentional), (attentional, weights)

        return step

    def project_memory_keys(self, memory: jax.Array) -> jax.Array:  # [B, S, D] -> [B, S, A]
        """Project the memory to the keys of the score."""
        if isinstance(self.config.score, DotScore):
            return memory
        if isinstance(self.config.score, AdditiveScore):
            return project_additive_keys(self, memory, self.sizes[1], self.context)
        embed, score = {"embed": self.context.d_model}, {"score": self.sizes[1]}
        return apply_linear(self, "score_key", memory, embed, score, self.context, bias=False)

    def make_score_fn(self) -> MemoryScoreFn:
        """Return the score of a state and all keys; additive scores declare W and v."""
        if isinstance(self.config.score, AdditiveScore):
            return additive_scorer(self, *self.sizes, self.context).scores
        return lambda state, keys: jnp.einsum("BA,BSA->BS", state, keys)


MIXERS[LuongConfig.kind] = LuongDecoder

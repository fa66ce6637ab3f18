"""LSTM decoder with global attention and input feeding (Luong, Pham and Manning 2015)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float

from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.scores import AdditiveScore, BilinearScore, DotScore
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    MemoryScoreFn,
    additive_score_fn,
    attend_with_scores,
    decoder_boundaries,
    first_token_state,
    init_lstm_state,
    keys_and_values,
    last_visible,
    memory_score_flops,
    needs_memory_cache_error,
    project_keys,
    visible_memory,
)
from transformer.baselines.recurrent import (
    LSTM_GATES,
    LSTMState,
    apply_matrix,
    lstm_input_gates,
    lstm_step,
    recurrent_weight,
    scan_cell,
)
from transformer.validation import NonNegativeInt


@dataclasses.dataclass(frozen=True)
class LuongConfig(MixerConfig):
    """LSTM decoder that attends to the memory after each step (Luong et al. 2015).

    The output h~ = tanh(W [c; h]) is also an input of the next step (input feeding, sections 3.1
    and 3.3). The initial state is computed from the last memory vector.
    """

    kind: ClassVar[str] = "luong"
    reads_memory: ClassVar[bool] = True

    hidden_size: NonNegativeInt = 0
    """H, width of the state; 0: D."""
    score: DotScore | BilinearScore | AdditiveScore = BilinearScore()
    """Score of a state and a memory vector. The paper calls these `dot`, `general`, `concat`."""

    def check_d_model(self, d_model: int) -> None:
        if isinstance(self.score, DotScore) and self.hidden_size not in (0, d_model):
            raise ValueError(
                f"LuongConfig.hidden_size {self.hidden_size}: the dot score needs states as wide "
                f"as the memory ({d_model}); give 0, or another score"
            )

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A, the width in which states and memory are scored, for width D."""
        hidden_size = self.hidden_size or d_model
        score_size = self.score.hidden_dim if isinstance(self.score, AdditiveScore) else 0
        return hidden_size, score_size or hidden_size


class LuongState(struct.PyTreeNode):
    """State of the LSTM, and the vector that is fed to it with the next token."""

    lstm: LSTMState
    attentional_hidden: Float[Array, "B D"]  # h~


@register_mixer
class LuongDecoder(Mixer):
    """Attentional hidden state h~ of each token."""

    config: LuongConfig

    @staticmethod
    def abilities(config: LuongConfig) -> Abilities:
        return Abilities()

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
        context, (hidden_size, score_size) = self.context, self.sizes
        lstm = LSTMState.empty(batch, hidden_size, context)
        attentional = jnp.zeros((batch, context.d_model), context.precision.compute)
        state = LuongState(lstm, attentional)
        return MemoryAttentionCache.empty(state, batch, length, score_size, context)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        context, (hidden_size, score_size) = self.context, self.sizes
        visible = visible_memory(self.config.kind, inputs, x.shape[1])
        initial_states = new_keys = None
        if inputs.memory is not None:
            # A state for each token, not for each row: packed documents begin anywhere in a row.
            last = last_visible(inputs.memory, visible)
            initial_lstm = init_lstm_state(self, last, hidden_size, context)
            initial_states = LuongState(initial_lstm, jnp.zeros_like(x))
            new_keys = inputs.memory
            if not isinstance(self.config.score, DotScore):
                new_keys = project_keys(self, inputs.memory, score_size, context)
        keys, values, cache = keys_and_values(inputs, new_keys, x.dtype)
        state = first_token_state(initial_states) if cache is None else cache.state
        input_gates, recurrent = lstm_input_gates(self, x, hidden_size, context)
        embed, hidden = {"embed": context.d_model}, {"hidden": context.d_model}
        gate_axes = {"gates": len(LSTM_GATES), "hidden": hidden_size}
        feed = recurrent_weight(self, "feed", embed, gate_axes, context)
        both = {"both": context.d_model + hidden_size}  # the attended memory, then the state
        combine = recurrent_weight(self, "combine", both, hidden, context)
        score_fn = self.make_score_fn()

        def cell(
            state: LuongState,
            step_inputs: tuple[Float[Array, "B 4 H"], Bool[Array, "#B S"]],
        ) -> tuple[LuongState, tuple[jax.Array, jax.Array]]:
            gates, visible = step_inputs
            gates = (
                gates
                + apply_matrix(state.lstm.hidden, recurrent)
                + apply_matrix(state.attentional_hidden, feed)
            )
            lstm = lstm_step(state.lstm, gates)
            scores = score_fn(lstm.hidden, keys)
            c, weights = attend_with_scores(scores, visible, values, context.precision.softmax)
            # h~ = tanh(W [c; h]), equation 5. The next step is fed with h~, not with h.
            attentional = jnp.tanh(
                apply_matrix(jnp.concatenate([c, lstm.hidden], axis=-1), combine)
            )
            return LuongState(lstm, attentional), (attentional, weights)

        boundaries = decoder_boundaries(inputs)
        state, (y, weights) = scan_cell(
            cell, state, (input_gates, visible), boundaries, initial_states
        )
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if cache is None else cache.replace(state=state), aux)

    def make_score_fn(self) -> MemoryScoreFn:
        """Return the score of a state and all keys; additive scores declare W and v."""
        if isinstance(self.config.score, AdditiveScore):
            return additive_score_fn(self, *self.sizes, self.context)
        return lambda state, keys: jnp.einsum("BA,BSA->BS", state, keys)

"""LSTM decoder that gets the source as one vector (Sutskever et al. 2014)."""

import dataclasses
from typing import ClassVar

import jax
from flax import linen as nn

from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.baselines.memory_attention import (
    check_has_memory,
    decoder_boundaries,
    first_token_state,
    init_lstm_state,
    last_visible,
    memory_mask,
)
from transformer.baselines.recurrent import LSTMLayer, LSTMState


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(MixerConfig):
    """LSTM decoder of width D that reads the source only through its initial state.

    An encoder's output has no final LSTM state, so the initial state is computed from the last
    memory vector m: h_0 = tanh(W m), c_0 = W' m.
    """

    kind: ClassVar[str] = "seq2seq"
    reads_memory: ClassVar[bool] = True


@register_mixer
class Seq2SeqDecoder(Mixer):
    """Hidden state at each token."""

    config: Seq2SeqConfig

    @staticmethod
    def abilities(config: Seq2SeqConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def score_flops(config: Seq2SeqConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LSTMState:
        return LSTMState.empty(batch, self.context.d_model, self.context)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LSTMState:
        return self.init_cache(batch, length)  # the state is all that is kept of the memory

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        context = self.context
        check_has_memory(self.config.kind, inputs)
        initial_states, state = None, inputs.cache
        if inputs.memory is not None:
            visible = memory_mask(inputs.mask, x.shape[1], inputs.memory.shape[1])
            last = last_visible(inputs.memory, visible)
            initial_states = init_lstm_state(self, last, context.d_model, context)
            state = first_token_state(initial_states) if state is None else state
        lstm = LSTMLayer(context.d_model, context, name="forward")
        state, y = lstm(x, decoder_boundaries(inputs), state, initial_states)
        return MixerOutput(y, None if inputs.cache is None else state, {})

"""The LSTM decoder that is told its source in one vector (Sutskever et al. 2014)."""

import jax
from flax import linen as nn

from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.cells import LSTMLayer, LSTMState
from transformer.recurrent.configs import Seq2SeqConfig as Seq2SeqConfig
from transformer.recurrent.memory import (
    at_first,
    last_seen,
    looked_at,
    lstm_from,
    require_memory,
)
from transformer.recurrent.scan import timeline
from transformer.refusals import refuse_weights


class Seq2Seq(Mixer):
    """The hidden state at each token."""

    config: Seq2SeqConfig

    @staticmethod
    def abilities(config: Seq2SeqConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(config: Seq2SeqConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: Seq2SeqConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LSTMState:
        return LSTMState.zeros(batch, self.shared.width, self.shared)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LSTMState:
        return self.init_cache(batch, length)  # all that it knows of the memory is its state

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        shared = self.shared
        require_memory(self.config.kind, inputs.memory, inputs.cache)
        refuse_weights(self.config.kind, inputs.outputs)
        line = timeline(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        seeds, first = None, inputs.cache
        if inputs.memory is not None:
            last = last_seen(
                inputs.memory, looked_at(inputs.mask, x.shape[1], inputs.memory.shape[1])
            )
            seeds = lstm_from(self, last, shared.width, shared)
            first = at_first(seeds) if inputs.cache is None else inputs.cache
        after, y = LSTMLayer(shared.width, shared, name="forward")(x, line, first, seeds)
        return MixerOutput(y, None if inputs.cache is None else after, {})


MIXERS[Seq2SeqConfig.kind] = Seq2Seq

"""The encoder of Google's neural machine translation (Wu et al. 2016, section 3)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.dropout import dropout, fold_in
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.recurrent.cells import LSTMLayer
from transformer.recurrent.configs import GNMTEncoderConfig as GNMTEncoderConfig
from transformer.recurrent.scan import document_boundaries
from transformer.refusals import reject_mask_patterns, reject_memory, reject_weights


class GNMTEncoder(Mixer):
    """The top layer's result. All layers are one mixer: the first hands on 2 D, the others D."""

    config: GNMTEncoderConfig

    @staticmethod
    def abilities(config: GNMTEncoderConfig) -> Abilities:
        return Abilities(causal=False, cached=False, cross=False, weights=False)

    @staticmethod
    def constants(config: GNMTEncoderConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: GNMTEncoderConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer gnmt_encoder: reads what comes later, so has no cache; use lstm")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        if inputs.mask.pattern.causal:
            raise ValueError("mixer gnmt_encoder: reads what comes later; use lstm in a decoder")
        line = document_boundaries(inputs.mask, inputs.positions)
        x = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        ahead = LSTMLayer(shared.d_model, shared, name="layer_0")(x, line)[1]
        turned = document_boundaries(inputs.mask, inputs.positions, backward=True)
        back = LSTMLayer(shared.d_model, shared, name="backward")(jnp.flip(x, axis=1), turned)[1]
        x = jnp.concatenate([ahead, jnp.flip(back, axis=1)], axis=-1)
        for layer in range(1, config.num_layers):
            read = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            y = LSTMLayer(shared.d_model, shared, name=f"layer_{layer}")(read, line)[1]
            x = y if layer == 1 else x + y
        return MixerOutput(x, None, {})


MIXERS[GNMTEncoderConfig.kind] = GNMTEncoder

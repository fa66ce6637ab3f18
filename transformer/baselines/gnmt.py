"""Google's neural machine translation system (Wu et al. 2016, section 3)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.base import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.masks import Mask
from transformer.baselines.cells import (
    DocumentBoundaries,
    LSTMLayer,
    LSTMState,
    apply_matrix,
    document_boundaries,
    lstm_input_gates,
    lstm_step,
    recurrent_weight,
    scan_cell,
)
from transformer.baselines.config import GNMTDecoderConfig, GNMTEncoderConfig
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_scorer,
    attend_with_scores,
    memory_mask,
    memory_score_flops,
    memory_vectors,
    needs_memory_cache_error,
    project_additive_keys,
)
from transformer.layers.basic import dropout, fold_in
from transformer.registry import MIXERS


class GNMTEncoder(Mixer):
    """Output of the top layer.

    All layers form one mixer because the first passes 2 D features to the second, the others D.
    """

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
        config, model_context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        if inputs.mask.pattern.causal:
            raise ValueError("mixer gnmt_encoder: reads what comes later; use lstm in a decoder")
        line = document_boundaries(inputs.mask, inputs.positions)
        x = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        ahead = LSTMLayer(model_context.d_model, model_context, name="layer_0")(x, line)[1]
        turned = document_boundaries(inputs.mask, inputs.positions, backward=True)
        back = LSTMLayer(model_context.d_model, model_context, name="backward")(
            jnp.flip(x, axis=1), turned
        )[1]
        x = jnp.concatenate([ahead, jnp.flip(back, axis=1)], axis=-1)
        for layer in range(1, config.num_layers):
            read = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            y = LSTMLayer(model_context.d_model, model_context, name=f"layer_{layer}")(read, line)[
                1
            ]
            x = y if layer == 1 else x + y
        return MixerOutput(x, None, {})


MIXERS[GNMTEncoderConfig.kind] = GNMTEncoder


class GNMTCache(struct.PyTreeNode):
    """States of all layers, and the memory."""

    first_layer: MemoryAttentionCache
    upper_layers: tuple[LSTMState, ...]


class GNMTDecoder(Mixer):
    """Output of the top layer.

    All layers form one mixer because they share the contexts of the first layer's attention.
    """

    config: GNMTDecoderConfig

    @staticmethod
    def abilities(config: GNMTDecoderConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: GNMTDecoderConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: GNMTDecoderConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.resolved_sizes(width)[1], width, length)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> GNMTCache:
        raise needs_memory_cache_error(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> GNMTCache:
        model_context, (width, score) = (
            self.context,
            self.config.resolved_sizes(self.context.d_model),
        )
        zeros = lambda last: jnp.zeros((batch, length, last), model_context.precision.compute)  # noqa: E731
        states = tuple(
            LSTMState.zeros(batch, width, model_context) for _ in range(self.config.num_layers)
        )
        return GNMTCache(MemoryAttentionCache(states[0], zeros(score), zeros(width)), states[1:])

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, model_context = self.config, self.context
        line = document_boundaries(
            Mask(segments=inputs.mask.segments), inputs.positions, cached=inputs.cache is not None
        )
        size = memory_vectors(
            config.kind, inputs.memory, None if inputs.cache is None else inputs.cache.first_layer
        ).shape[1]
        states = inputs.cache or self.init_memory_cache(x.shape[0], size)
        first = states.first_layer
        if inputs.memory is not None:
            looks = project_additive_keys(
                self, inputs.memory, config.resolved_sizes(model_context.d_model)[1], model_context
            )
            first = MemoryAttentionCache(first.state, looks, inputs.memory)
        read = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        seen = memory_mask(inputs.mask, x.shape[1], size)
        state, (x, contexts, weights) = self.first_layer(read, seen, first, line)
        above = []
        for layer in range(1, config.num_layers):
            read = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            read = jnp.concatenate([read, contexts], axis=-1)
            lstm = LSTMLayer(model_context.d_model, model_context, name=f"layer_{layer}")
            after, y = lstm(read, line, states.upper_layers[layer - 1])
            above.append(after)
            x = y if layer == 1 else x + y
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        kept = GNMTCache(first.replace(state=state), tuple(above))
        return MixerOutput(x, None if inputs.cache is None else kept, aux)

    def first_layer(
        self,
        x: jax.Array,  # [B, T, D]
        seen: jax.Array,  # [B or 1, T, S]
        first: MemoryAttentionCache,
        boundaries: DocumentBoundaries | None,
    ) -> tuple[LSTMState, tuple[jax.Array, jax.Array, jax.Array]]:
        """Return outputs [B, T, D], contexts [B, T, D] and weights [B, T, S] of the first layer."""
        model_context, (width, score) = (
            self.context,
            self.config.resolved_sizes(self.context.d_model),
        )
        embed, gates = {"embed": width}, {"gates": 4, "hidden": width}
        driven, recurrent = lstm_input_gates(self, x, embed, width, model_context)
        of_context = recurrent_weight(self, "context", embed, gates, model_context)
        mlp = additive_scorer(self, width, score, model_context)

        def cell(state: LSTMState, now: tuple[jax.Array, jax.Array]) -> tuple[LSTMState, Any]:
            driven, seen = now
            scores = mlp.scores(state.hidden, first.keys)
            context, weights = attend_with_scores(
                scores, seen, first.values, model_context.precision.softmax
            )
            gates = (
                driven + apply_matrix(state.hidden, recurrent) + apply_matrix(context, of_context)
            )
            state = lstm_step(state, gates)
            return state, (state.hidden, context, weights)

        return scan_cell(cell, first.state, (driven, seen), boundaries)


MIXERS[GNMTDecoderConfig.kind] = GNMTDecoder

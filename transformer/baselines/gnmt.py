"""Google's neural machine translation system (Wu et al. 2016, section 3)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.document_boundaries import DocumentBoundaries, document_boundaries
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.baselines.cells import (
    LSTM_GATES,
    LSTMLayer,
    LSTMState,
    apply_matrix,
    lstm_input_gates,
    lstm_step,
    recurrent_weight,
    scan_cell,
)
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_scorer,
    attend_with_scores,
    decoder_boundaries,
    keys_and_values,
    memory_score_flops,
    needs_memory_cache_error,
    project_additive_keys,
    visible_memory,
)
from transformer.layers.basic import dropout, fold_in
from transformer.validation import check_at_least, check_fraction


@dataclasses.dataclass(frozen=True)
class GNMTEncoderConfig(MixerConfig):
    """Encoder of GNMT: stacked LSTM layers, the first bidirectional, residual from the third on."""

    kind: ClassVar[str] = "gnmt_encoder"

    num_layers: int = 3
    """Number of LSTM layers; the paper uses 8."""
    dropout: float = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_encoder.num_layers", self.num_layers, 2)
        check_fraction("gnmt_encoder.dropout", self.dropout)


@dataclasses.dataclass(frozen=True)
class GNMTDecoderConfig(MixerConfig):
    """Decoder of GNMT: stacked LSTM layers that share the attention of the first one.

    The first layer attends with its state before each token, so that upper layers can run one
    after the other over the whole sequence. Layers are residual from the third on.
    """

    kind: ClassVar[str] = "gnmt_decoder"
    reads_memory: ClassVar[bool] = True

    num_layers: int = 3
    """Number of LSTM layers; the paper uses 8."""
    score_size: int = 0
    """A, width of the hidden layer of the additive score; 0: D."""
    dropout: float = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_decoder.num_layers", self.num_layers, 1)
        check_at_least("gnmt_decoder.score_size", self.score_size, 0)
        check_fraction("gnmt_decoder.dropout", self.dropout)

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A for a model of width D."""
        return d_model, self.score_size or d_model


@register_mixer
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
        raise ValueError(
            "mixer gnmt_encoder: reads later tokens, so it cannot decode with a cache; use lstm"
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        if inputs.mask.pattern.causal:
            raise ValueError("mixer gnmt_encoder: reads later tokens; use lstm in a decoder")
        boundaries = document_boundaries(inputs.mask, inputs.positions)
        x = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        forward_y = LSTMLayer(context.d_model, context, name="layer_0")(x, boundaries)[1]
        # The backward LSTM reads flipped rows: its documents begin where those of x end.
        flipped = document_boundaries(inputs.mask, inputs.positions, backward=True)
        backward = LSTMLayer(context.d_model, context, name="backward")
        backward_y = jnp.flip(backward(jnp.flip(x, axis=1), flipped)[1], axis=1)
        x = jnp.concatenate([forward_y, backward_y], axis=-1)
        for layer in range(1, config.num_layers):
            layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            lstm = LSTMLayer(context.d_model, context, name=f"layer_{layer}")
            y = lstm(layer_input, boundaries)[1]
            x = y if layer == 1 else x + y  # the first layer's output is 2 D wide
        return MixerOutput(x, None, {})


class GNMTCache(struct.PyTreeNode):
    """States of all layers, and the memory."""

    first_layer: MemoryAttentionCache
    upper_layers: tuple[LSTMState, ...]

    @classmethod
    def empty(
        cls,
        states: Sequence[LSTMState],  # of all layers
        batch_size: int,  # B
        length: int,  # S
        score_size: int,  # A
        width: int,  # D
        dtype: Any,  # of the memory's keys and values
    ) -> "GNMTCache":
        """Return a cache for a memory of `length` tokens."""
        sizes = batch_size, length, score_size, width
        first_layer = MemoryAttentionCache.empty(states[0], *sizes, dtype)
        return cls(first_layer, tuple(states[1:]))


@register_mixer
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
        precision, sizes = self.context.precision, self.config.resolved_sizes(self.context.d_model)
        width, score_size = sizes
        states = self.initial_states(batch)
        return GNMTCache.empty(states, batch, length, score_size, width, precision.cache_dtype)

    @nn.nowrap
    def initial_states(self, batch: int) -> list[LSTMState]:
        """Return the states of all layers before the first token: zeros, unlike other decoders."""
        width, dtype = self.context.d_model, self.context.precision.compute
        return [LSTMState.empty(batch, width, dtype) for _ in range(self.config.num_layers)]

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context, cache = self.config, self.context, inputs.cache
        first_cache = None if cache is None else cache.first_layer
        boundaries = decoder_boundaries(inputs)
        visible = visible_memory(config.kind, inputs, first_cache, x.shape[1])
        new_keys = None
        if inputs.memory is not None:
            score_size = config.resolved_sizes(context.d_model)[1]
            new_keys = project_additive_keys(self, inputs.memory, score_size, context)
        keys, values, first_cache = keys_and_values(first_cache, new_keys, inputs.memory, x.dtype)
        if first_cache is None:
            first_state, *states = self.initial_states(x.shape[0])
        else:
            first_state, states = first_cache.state, cache.upper_layers
        layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        first_state, (x, contexts, weights) = self.first_layer(
            layer_input, visible, keys, values, first_state, boundaries
        )
        upper_states = []
        for layer in range(1, config.num_layers):
            layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            # Attention is computed once for each token, by the first layer; all layers get its
            # contexts (Wu et al. 2016, section 3), so the upper layers are plain LSTMs.
            layer_input = jnp.concatenate([layer_input, contexts], axis=-1)
            lstm = LSTMLayer(context.d_model, context, name=f"layer_{layer}")
            state, y = lstm(layer_input, boundaries, states[layer - 1])
            upper_states.append(state)
            x = y if layer == 1 else x + y
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        if first_cache is None:
            return MixerOutput(x, None, aux)
        return MixerOutput(
            x, GNMTCache(first_cache.replace(state=first_state), tuple(upper_states)), aux
        )

    def first_layer(
        self,
        x: jax.Array,  # [B, T, D]
        visible: jax.Array,  # [B or 1, T, S]
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
        state: LSTMState,
        boundaries: DocumentBoundaries | None,
    ) -> tuple[LSTMState, tuple[jax.Array, jax.Array, jax.Array]]:
        """Return outputs [B, T, D], contexts [B, T, D] and weights [B, T, S] of the first layer."""
        model_context = self.context
        width, score_size = self.config.resolved_sizes(model_context.d_model)
        embed, gate_axes = {"embed": width}, {"gates": len(LSTM_GATES), "hidden": width}
        input_gates, recurrent = lstm_input_gates(self, x, embed, width, model_context)
        context_gates = recurrent_weight(self, "context", embed, gate_axes, model_context)
        scorer = additive_scorer(self, width, score_size, model_context)

        def cell(
            state: LSTMState,
            step_inputs: tuple[jax.Array, jax.Array],  # [B, 4, D], [B or 1, S]
        ) -> tuple[LSTMState, Any]:
            gates, visible = step_inputs
            scores = scorer.scores(state.hidden, keys)
            context, weights = attend_with_scores(
                scores, visible, values, model_context.precision.softmax
            )
            gates = (
                gates + apply_matrix(state.hidden, recurrent) + apply_matrix(context, context_gates)
            )
            state = lstm_step(state, gates)
            return state, (state.hidden, context, weights)

        return scan_cell(cell, state, (input_gates, visible), boundaries)

"""Google's neural machine translation system (Wu et al. 2016, section 3)."""

import dataclasses
from typing import Annotated, ClassVar, NoReturn

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer.attention.document_boundaries import document_boundaries
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
)
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_score_fn,
    attend_with_scores,
    decoder_boundaries,
    keys_and_values,
    memory_score_flops,
    needs_memory_cache_error,
    project_keys,
    visible_memory,
)
from transformer.baselines.recurrent import (
    LSTM_GATES,
    LSTMLayer,
    LSTMState,
    apply_matrix,
    lstm_input_gates,
    lstm_step,
    read_backward,
    recurrent_weight,
    scan_cell,
)
from transformer.layers.basic import dropout, fold_in
from transformer.validation import Bounds, Fraction, NonNegativeInt


@dataclasses.dataclass(frozen=True)
class GNMTEncoderConfig(MixerConfig):
    """Encoder of GNMT: stacked LSTM layers, the first bidirectional, residual from the third on."""

    kind: ClassVar[str] = "gnmt_encoder"

    num_layers: Annotated[int, Bounds(2, 10_000)] = 3
    """Number of LSTM layers; the paper uses 8."""
    dropout: Fraction = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""


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
    def score_flops(config: GNMTEncoderConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> NoReturn:
        raise ValueError(
            "mixer gnmt_encoder: reads later tokens, so it cannot decode with a cache; use lstm"
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_mask_patterns(config.kind, inputs.mask)
        if inputs.mask.pattern.causal:
            raise ValueError("mixer gnmt_encoder: reads later tokens; use lstm in a decoder")
        boundaries = document_boundaries(inputs.mask, inputs.positions)
        x = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        forward_y = LSTMLayer(context.d_model, context, name="layer_0")(x, boundaries)[1]
        backward = LSTMLayer(context.d_model, context, name="backward")
        x = jnp.concatenate([forward_y, read_backward(backward, x, inputs)], axis=-1)
        for layer in range(1, config.num_layers):
            layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            lstm = LSTMLayer(context.d_model, context, name=f"layer_{layer}")
            y = lstm(layer_input, boundaries)[1]
            x = y if layer == 1 else x + y  # the first layer's output is 2 D wide
        return MixerOutput(x, None, {})


@dataclasses.dataclass(frozen=True)
class GNMTDecoderConfig(MixerConfig):
    """Decoder of GNMT: stacked LSTM layers that share the attention of the first one.

    The first layer attends with its state before each token, so that upper layers can run one
    after the other over the whole sequence. Layers are residual from the third on.
    """

    kind: ClassVar[str] = "gnmt_decoder"
    reads_memory: ClassVar[bool] = True

    num_layers: Annotated[int, Bounds(1, 10_000)] = 3
    """Number of LSTM layers; the paper uses 8."""
    score_size: NonNegativeInt = 0
    """A, width of the hidden layer of the additive score; 0: D."""
    dropout: Fraction = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A for a model of width D."""
        return d_model, self.score_size or d_model


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
    def score_flops(config: GNMTDecoderConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.resolved_sizes(width)[1], width, length)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        raise needs_memory_cache_error(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        score_size = self.config.resolved_sizes(self.context.d_model)[1]
        states = self.initial_states(batch)
        return MemoryAttentionCache.empty(states, batch, length, score_size, self.context)

    @nn.nowrap
    def initial_states(self, batch: int) -> tuple[LSTMState, ...]:
        """Return the states of all layers before the first token: zeros, unlike other decoders."""
        zeros = LSTMState.empty(batch, self.context.d_model, self.context)
        return (zeros,) * self.config.num_layers

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        width, score_size = config.resolved_sizes(context.d_model)
        boundaries = decoder_boundaries(inputs)
        visible = visible_memory(config.kind, inputs, x.shape[1])
        new_keys = None
        if inputs.memory is not None:
            new_keys = project_keys(self, inputs.memory, score_size, context)
        keys, values, cache = keys_and_values(inputs, new_keys, x.dtype)
        states = self.initial_states(x.shape[0]) if cache is None else cache.state
        layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, 0))
        input_gates, recurrent = lstm_input_gates(self, layer_input, width, context)
        embed, gate_axes = {"embed": width}, {"gates": len(LSTM_GATES), "hidden": width}
        context_gates = recurrent_weight(self, "context", embed, gate_axes, context)
        score_fn = additive_score_fn(self, width, score_size, context)

        def first_cell(
            state: LSTMState,
            step_inputs: tuple[Float[Array, "B 4 D"], Bool[Array, "#B S"]],
        ) -> tuple[LSTMState, tuple[jax.Array, jax.Array, jax.Array]]:
            gates, visible = step_inputs
            scores = score_fn(state.hidden, keys)
            c, weights = attend_with_scores(scores, visible, values, context.precision.softmax)
            gates = gates + apply_matrix(state.hidden, recurrent) + apply_matrix(c, context_gates)
            state = lstm_step(state, gates)
            return state, (state.hidden, c, weights)

        state, (x, contexts, weights) = scan_cell(
            first_cell, states[0], (input_gates, visible), boundaries
        )
        new_states = [state]
        for layer in range(1, config.num_layers):
            layer_input = dropout(x, config.dropout, fold_in(inputs.dropout_rngs, layer))
            # Attention is computed once for each token, by the first layer; all layers get its
            # contexts (Wu et al. 2016, section 3), so the upper layers are plain LSTMs.
            layer_input = jnp.concatenate([layer_input, contexts], axis=-1)
            lstm = LSTMLayer(width, context, name=f"layer_{layer}")
            state, y = lstm(layer_input, boundaries, states[layer])
            new_states.append(state)
            x = y if layer == 1 else x + y
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(
            x, None if cache is None else cache.replace(state=tuple(new_states)), aux
        )

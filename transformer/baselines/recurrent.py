"""Recurrent mixers: simple recurrent network and LSTM.

- `ElmanRNN` (Elman 1990), optionally with a deep transition.
- `LSTM` (Hochreiter and Schmidhuber 1997), unidirectional or bidirectional.

Their cells and the scan over time are in `cells.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.document_boundaries import document_boundaries
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.baselines.baseline_configs import ElmanConfig, LSTMConfig
from transformer.baselines.cells import (
    LSTMLayer,
    LSTMState,
    apply_matrix,
    recurrent_weight,
    scan_cell,
)
from transformer.layers.basic import apply_linear
from transformer.mixer_registry import MIXERS


class ElmanState(struct.PyTreeNode):
    """Recurrent state, which is also the cache."""

    hidden: jax.Array  # [B, H]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        hidden_size: int,  # H
        dtype: Any,  # the compute dtype
    ) -> "ElmanState":
        """Return the state before the first token."""
        return cls(jnp.zeros((batch_size, hidden_size), dtype))


class ElmanRNN(Mixer):
    """Recurrent state at each token."""

    config: ElmanConfig

    @staticmethod
    def abilities(config: ElmanConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: ElmanConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: ElmanConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> ElmanState:
        width = self.config.hidden_size or self.context.d_model
        return ElmanState.empty(batch, width, self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.hidden_size or context.d_model
        embed, hidden, state = {"embed": context.d_model}, {"hidden": width}, {"state": width}
        # One product for all tokens, before the scan: only the recurrent product is sequential.
        input_terms = apply_linear(self, "input", x, embed, hidden, context, bias=True)
        recurrent = recurrent_weight(self, "recurrent", state, hidden, context)
        zeros = nn.initializers.zeros
        transition = [
            (
                recurrent_weight(self, f"deeper_{layer}", state, hidden, context),
                recurrent_weight(self, f"deeper_{layer}_bias", {}, hidden, context, zeros),
            )
            for layer in range(1, config.transition_depth)
        ]

        def cell(state: ElmanState, input_term: jax.Array) -> tuple[ElmanState, jax.Array]:
            h = jnp.tanh(input_term + apply_matrix(state.hidden, recurrent))
            for matrix, bias in transition:
                h = jnp.tanh(apply_matrix(h, matrix) + bias[None])
            return ElmanState(h), h

        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        before = inputs.cache if cached else self.init_cache(*x.shape[:2])
        after, y = scan_cell(cell, before, input_terms, boundaries)
        if width != context.d_model:
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, after if cached else None, {})


MIXERS[ElmanConfig.kind] = ElmanRNN


class LSTM(Mixer):
    """Hidden state of each token; both directions are concatenated."""

    config: LSTMConfig

    @staticmethod
    def abilities(config: LSTMConfig) -> Abilities:
        forward = not config.bidirectional
        return Abilities(causal=forward, cached=forward, cross=False, weights=False)

    @staticmethod
    def constants(config: LSTMConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LSTMConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LSTMState:
        self.check_not_bidirectional("a cache")
        hidden_size = self.config.resolved_hidden_size(self.context.d_model)
        return LSTMState.empty(batch, hidden_size, self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.resolved_hidden_size(context.d_model)
        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        state, y = LSTMLayer(width, context, name="forward")(x, boundaries, inputs.cache)
        if config.bidirectional:
            if inputs.mask.pattern.causal:
                self.check_not_bidirectional("a causal mask")
            boundaries = document_boundaries(inputs.mask, inputs.positions, backward=True)
            flipped = jnp.flip(x, axis=1)
            backward_y = LSTMLayer(width, context, name="backward")(flipped, boundaries)[1]
            y = jnp.concatenate([y, jnp.flip(backward_y, axis=1)], axis=-1)
        if y.shape[-1] != context.d_model:
            hidden, embed = {"hidden": y.shape[-1]}, {"embed": context.d_model}
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, state if cached else None, {})

    @nn.nowrap
    def check_not_bidirectional(self, requested: str) -> None:
        if self.config.bidirectional:
            raise ValueError(
                "mixer lstm: bidirectional reads later tokens, so it does not support "
                f"{requested}; use it in an encoder, or set bidirectional to False"
            )


MIXERS[LSTMConfig.kind] = LSTM

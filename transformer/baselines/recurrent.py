"""Recurrent mixers: simple recurrent network and LSTM.

- `ElmanRNN` (Elman 1990), optionally with a deep transition.
- `LSTM` (Hochreiter and Schmidhuber 1997), unidirectional or bidirectional.

Their cells and the scan over time are in `cells.py`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

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
    reject_memory,
    reject_weights,
)
from transformer.baselines.cells import (
    LSTMLayer,
    LSTMState,
    apply_matrix,
    recurrent_weight,
    scan_cell,
)
from transformer.layers.basic import apply_linear
from transformer.validation import check_at_least


@dataclasses.dataclass(frozen=True)
class ElmanConfig(MixerConfig):
    """Simple recurrent network (Elman 1990): h_t = tanh(W x_t + U h_(t-1) + b).

    The cache is the state h.
    """

    kind: ClassVar[str] = "elman"

    hidden_size: int = 0
    """H, width of the state; 0: D. If H differs from D, the output is projected to D."""
    transition_depth: int = 1
    """Number of layers from one state to the next. More than 1 makes the transition an MLP of x_t
    and h_(t-1) (deep transition, Pascanu et al. 2014)."""

    def __post_init__(self) -> None:
        check_at_least("elman.hidden_size", self.hidden_size, 0)
        check_at_least("elman.transition_depth", self.transition_depth, 1)


@dataclasses.dataclass(frozen=True)
class LSTMConfig(MixerConfig):
    """LSTM with a forget gate whose bias starts at 1 (Gers et al. 2000; Jozefowicz et al. 2015).

    The cache is the state. A unidirectional LSTM is causal with or without a causal mask.
    """

    kind: ClassVar[str] = "lstm"

    hidden_size: int = 0
    """H, width of each direction. 0: the outputs of all directions together are D wide. Any other
    width is projected to D."""
    bidirectional: bool = False
    """Also read each document backward (Schuster and Paliwal 1997). Not under a causal mask."""

    def __post_init__(self) -> None:
        check_at_least("lstm.hidden_size", self.hidden_size, 0)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_hidden_size(d_model)

    def resolved_hidden_size(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: D has to be halved and is odd.
        """
        if self.bidirectional and not self.hidden_size and d_model % 2:
            raise ValueError(
                f"lstm.bidirectional: halves the width {d_model}, which is odd; give an even "
                "width, or set hidden_size"
            )
        return self.hidden_size or d_model // (1 + self.bidirectional)


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


@register_mixer
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


@register_mixer
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

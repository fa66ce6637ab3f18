"""LSTM with attention to its own past states (Cheng, Dong and Lapata 2016).

An early form of self-attention. It still processes one token after the other.
"""

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
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.token_segments import token_segments
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
from transformer.baselines.config import ChengConfig
from transformer.baselines.memory_attention import additive_scorer, attend_with_scores
from transformer.layers.basic import apply_linear
from transformer.registry import MIXERS


class StateTapes(struct.PyTreeNode):
    """States of all previous tokens (row s: the token at row index s); also the cache."""

    hidden: jax.Array  # [B, S, D]
    cells: jax.Array  # [B, S, D] float32
    keys: jax.Array  # [B, S, A] what of the hidden states meets the score
    summary: jax.Array  # [B, D] h~ of the last token

    def append(
        self,
        position: jax.Array,  # [B]
        state: LSTMState,
        key: jax.Array,  # [B, A]
        summary: jax.Array,  # [B, D]
    ) -> "StateTapes":
        """Write one token. The position of padding, below 0, is clamped to 0."""

        def put(tape: jax.Array, new: jax.Array) -> jax.Array:
            one = lambda row, each, at: jax.lax.dynamic_update_slice(row, each[None], (at, 0))  # noqa: E731
            return jax.vmap(one)(tape, new.astype(tape.dtype), position)

        return StateTapes(
            put(self.hidden, state.hidden),
            put(self.cells, state.cell),
            put(self.keys, key),
            summary,
        )


class Cheng(Mixer):
    """Hidden state of each token.

    Attention weights cannot be requested: the first token has nothing to attend to, so its weights
    do not sum to one.
    """

    config: ChengConfig

    @staticmethod
    def abilities(config: ChengConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: ChengConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: ChengConfig, width: int, length: int) -> ScoreFlops:
        """Count scores and averages of hidden states and cells over the previous tokens."""
        each = (config.score_size or width) + 2 * width
        return ScoreFlops(full=2 * each * length, causal=each * (length - 1))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> StateTapes:
        width, dtype = self.context.d_model, self.context.precision.compute
        hidden = jnp.zeros((batch, length, width), dtype)
        keys = jnp.zeros((batch, length, self.config.score_size or width), dtype)
        return StateTapes(
            hidden, hidden.astype(jnp.float32), keys, jnp.zeros((batch, width), dtype)
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        (batch, length, _), embed = x.shape, {"embed": context.d_model}
        line = document_boundaries(inputs.mask, inputs.positions, cached=inputs.cache is not None)
        if inputs.cache is None:
            places = jnp.broadcast_to(jnp.arange(length)[None, :], (batch, length))
            whole = Mask(MaskPattern(causal=True), segments=token_segments(inputs.mask, length))
            seen = dense_mask(whole, length, length) & ~jnp.eye(length, dtype=bool)[None]
            tapes = self.init_cache(batch, length)
        else:
            places = jnp.broadcast_to(inputs.positions, (batch, length))
            seen = jnp.arange(inputs.cache.hidden.shape[1])[None, None, :] < places[:, :, None]
            tapes = inputs.cache
        gates, recurrent = lstm_input_gates(self, x, embed, context.d_model, context)
        score = {"score": config.score_size or context.d_model}
        query = apply_linear(self, "score_token", x, embed, score, context, bias=False)
        steps = (gates, query, seen, jnp.maximum(places, 0))
        after, y = scan_cell(self.make_cell(recurrent), tapes, steps, line)
        return MixerOutput(y, None if inputs.cache is None else after, {})

    def make_cell(self, recurrent: jax.Array) -> RecurrentCell:  # [D, 4, D]
        """Declare the weights of the recurrent cell and return the cell (equations 5 to 9)."""
        context, width = self.context, self.context.d_model
        score = self.config.score_size or width
        mlp = additive_scorer(self, width, score, context)
        of_state = recurrent_weight(self, "score_key", {"state": width}, {"score": score}, context)

        def step(
            tapes: StateTapes,
            now: tuple[jax.Array, ...],  # [B, 4, D], [B, A], [B or 1, S], [B]
        ) -> tuple[StateTapes, jax.Array]:
            gates, query, seen, place = now
            scores = mlp.scores(tapes.summary, tapes.keys + query[:, None])
            hidden, weights = attend_with_scores(
                scores, seen, tapes.hidden, context.precision.softmax
            )
            cells = jnp.einsum("BS,BSD->BD", weights.astype(jnp.float32), tapes.cells)
            state = lstm_step(LSTMState(hidden, cells), gates + apply_matrix(hidden, recurrent))
            key = apply_matrix(state.hidden, of_state)
            return tapes.append(place, state, key, hidden), state.hidden

        return step


MIXERS[ChengConfig.kind] = Cheng

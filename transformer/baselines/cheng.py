"""LSTM with attention to its own past states (Cheng, Dong and Lapata 2016).

An early form of self-attention. It still processes one token after the other.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from transformer.attention.document_boundaries import document_boundaries, token_segments
from transformer.attention.masks import Mask, MaskPattern, dense_mask
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
from transformer.baselines.memory_attention import additive_score_fn, attend_with_scores
from transformer.baselines.recurrent import (
    LSTMState,
    apply_matrix,
    lstm_input_gates,
    lstm_step,
    recurrent_weight,
    scan_cell,
)
from transformer.layers.basic import apply_linear
from transformer.validation import NonNegativeInt


@dataclasses.dataclass(frozen=True)
class ChengConfig(MixerConfig):
    """Long Short-Term Memory-Network (Cheng et al. 2016): an LSTM that attends to its past states.

    The backward pass keeps all previous states for every step, T^2 D numbers per row. Use it for
    short sequences only.
    """

    kind: ClassVar[str] = "cheng"

    score_size: NonNegativeInt = 0
    """A, width of the hidden layer of the additive score; 0: D."""


class StateTapes(struct.PyTreeNode):
    """States of all previous tokens (row s: the token at row index s); also the cache.

    The paper's hidden tape and memory tape. A row is written once and then only read, so `hidden`
    and `keys` are stored in the cache's dtype. `cells` are sums over all tokens and `summary` is
    rewritten at each token: they keep the dtypes of the recurrence.
    """

    hidden: Float[Array, "B S D"]
    cells: Float32[Array, "B S D"]
    keys: Float[Array, "B S A"]  # hidden states, projected for the score
    summary: Float[Array, "B D"]  # h~ of the last token

    def append(
        self,
        position: Int[Array, "B"],
        state: LSTMState,
        key: Float[Array, "B A"],
        summary: Float[Array, "B D"],
    ) -> "StateTapes":
        """Return the tapes with one more token."""
        # Not `.at[].set`: its derivative handles indices that repeat, at the cost of more scatters.
        write_rows = jax.vmap(functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0))

        def write(tape: jax.Array, new: jax.Array) -> jax.Array:
            return write_rows(tape, new.astype(tape.dtype), position)

        return StateTapes(
            write(self.hidden, state.hidden),
            write(self.cells, state.cell),
            write(self.keys, key),
            summary,
        )

    def read(self, dtype: jnp.dtype) -> tuple[Float[Array, "B S D"], Float[Array, "B S A"]]:
        """Return hidden states and keys in `dtype`."""
        return self.hidden.astype(dtype), self.keys.astype(dtype)


@register_mixer
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
    def score_flops(config: ChengConfig, width: int, length: int) -> ScoreFlops:
        """Count scores and averages of hidden states and cells over the previous tokens."""
        per_key = (config.score_size or width) + 2 * width
        return ScoreFlops(full=2 * per_key * length, causal=per_key * (length - 1))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> StateTapes:
        return self.empty_tapes(batch, length, self.context.precision.cache_dtype)

    @nn.nowrap
    def empty_tapes(self, batch: int, length: int, dtype: str) -> StateTapes:
        """Return tapes with room for `length` tokens, whose hidden states and keys have `dtype`."""
        width = self.context.d_model
        return StateTapes(
            hidden=jnp.zeros((batch, length, width), dtype),
            cells=jnp.zeros((batch, length, width), jnp.float32),
            keys=jnp.zeros((batch, length, self.config.score_size or width), dtype),
            summary=jnp.zeros((batch, width), self.context.precision.compute),
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_mask_patterns(config.kind, inputs.mask)
        (batch, length, _), embed = x.shape, {"embed": context.d_model}
        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        if cached:
            tapes = inputs.cache
            slots = jnp.broadcast_to(inputs.positions, (batch, length))
            # A row of the cache holds one document, so its slots are positions.
            visible = jnp.arange(tapes.hidden.shape[1])[None, None, :] < slots[:, :, None]
        else:
            # Not `init_cache`: without a cache nothing is stored, so nothing is rounded to the
            # storage dtype. Slots are row indices, since positions restart in each document.
            tapes = self.empty_tapes(batch, length, context.precision.compute)
            slots = jnp.broadcast_to(jnp.arange(length)[None, :], (batch, length))
            causal = Mask(MaskPattern(causal=True), segments=token_segments(inputs.mask, length))
            visible = dense_mask(causal, length, length) & ~jnp.eye(length, dtype=bool)[None]
        gates, recurrent = lstm_input_gates(self, x, context.d_model, context)
        score = {"score": config.score_size or context.d_model}
        query = apply_linear(self, "score_token", x, embed, score, context, bias=False)
        # Padding has slot -1. `scan_cell` discards what it writes.
        steps = (gates, query, visible, jnp.maximum(slots, 0))
        score_fn = additive_score_fn(self, context.d_model, score["score"], context)
        state_axes = {"state": context.d_model}
        score_key = recurrent_weight(self, "score_key", state_axes, score, context)

        def cell(
            tapes: StateTapes,
            step_inputs: tuple[jax.Array, ...],  # [B, 4, D], [B, A], [B or 1, S], [B]
        ) -> tuple[StateTapes, jax.Array]:
            # Equations 5 to 9.
            gates, query, visible, slot = step_inputs
            past_hidden, keys = tapes.read(gates.dtype)
            scores = score_fn(tapes.summary, keys + query[:, None])
            hidden, weights = attend_with_scores(
                scores, visible, past_hidden, context.precision.softmax
            )
            cells = jnp.einsum("BS,BSD->BD", weights.astype(jnp.float32), tapes.cells)
            state = lstm_step(LSTMState(hidden, cells), gates + apply_matrix(hidden, recurrent))
            # Keys are projected when a state is written, once, not for every later query.
            key = apply_matrix(state.hidden, score_key)
            return tapes.append(slot, state, key, hidden), state.hidden

        tapes, y = scan_cell(cell, tapes, steps, boundaries)
        return MixerOutput(y, tapes if cached else None, {})

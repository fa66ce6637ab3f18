"""Attention inside recurrent decoders: scores, masks and initial states from the memory.

`memory` is the output of an encoder, [B, S, D].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Real

from transformer.attention.document_boundaries import DocumentBoundaries, document_boundaries
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import MixerInputs, ScoreFlops
from transformer.baselines.recurrent import (
    RECURRENT_INIT,
    LSTMState,
    apply_matrix,
    recurrent_weight,
)
from transformer.layers.basic import apply_linear
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum
from transformer.model_context import ModelContext

MemoryScoreFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(state [B, H], keys [B, S, A]) -> scores [B, S]."""


def additive_score_fn(
    module: nn.Module,
    state_size: int,  # H
    score_size: int,  # A
    context: ModelContext,
) -> MemoryScoreFn:
    """Declare W and v of v . tanh(W state + key) (Bahdanau et al. 2015, appendix A.1.2)."""
    score = {"score": score_size}
    query_matrix = recurrent_weight(module, "score_query", {"state": state_size}, score, context)
    init = RECURRENT_INIT.matrix_initializer(score)
    vector = recurrent_weight(module, "score_vector", {}, score, context, init)

    def score_fn(
        state: Float[Array, "B H"],
        keys: Float[Array, "B S A"],
    ) -> Float[Array, "B S"]:
        hidden = jnp.tanh(apply_matrix(state, query_matrix)[:, None] + keys)
        return jnp.einsum("BSA,A->BS", hidden, vector)

    return score_fn


def project_keys(
    module: nn.Module,
    memory: Float[Array, "B S D"],
    score_size: int,  # A
    context: ModelContext,
) -> Float[Array, "B S A"]:
    """Declare the matrix U of the keys and return U memory."""
    embed, score = {"embed": memory.shape[-1]}, {"score": score_size}
    return apply_linear(module, "score_key", memory, embed, score, context, bias=False)


def memory_score_flops(score_size: int, width: int, length: int) -> ScoreFlops:
    """Count attention to the whole memory at each step, with or without a causal mask."""
    flops = 2 * (score_size + width) * length  # the scores, and the weighted average
    return ScoreFlops(full=flops, causal=flops)


class MemoryAttentionCache(struct.PyTreeNode):
    """Recurrent state of a decoder, and the keys and values of its memory.

    The state keeps the dtypes of the recurrence; keys and values are stored in the cache's dtype.
    """

    state: Any  # leaves [B, ...]
    keys: Float[Array, "B S A"]
    values: Float[Array, "B S D"]

    @classmethod
    def empty(
        cls,
        state: Any,  # before the first token; leaves [B, ...]
        batch: int,  # B
        length: int,  # S
        score_size: int,  # A
        context: ModelContext,
    ) -> "MemoryAttentionCache":
        """Return a cache for a memory of `length` tokens."""
        keys, values = (
            jnp.zeros((batch, length, size), context.precision.cache_dtype)
            for size in (score_size, context.d_model)
        )
        return cls(state, keys, values)

    def append(
        self,
        keys: Float[Array, "B S A"],
        values: Float[Array, "B S D"],
    ) -> "MemoryAttentionCache":
        """Return the cache filled with a memory, which replaces the old one."""
        return self.replace(
            keys=keys.astype(self.keys.dtype), values=values.astype(self.values.dtype)
        )

    def read(self, dtype: jnp.dtype) -> tuple[Float[Array, "B S A"], Float[Array, "B S D"]]:
        """Return the memory's keys and values in `dtype`."""
        return self.keys.astype(dtype), self.values.astype(dtype)


def needs_memory_cache_error(kind: str) -> ValueError:
    """Return the error for `init_cache` of a mixer whose cache holds a memory."""
    return ValueError(f"mixer {kind}: its cache is one for a memory; call init_memory_cache")


def check_has_memory(kind: str, inputs: MixerInputs) -> None:
    """Raise ValueError if there is neither a memory nor a cache that holds one."""
    if inputs.memory is None and inputs.cache is None:
        raise ValueError(f"mixer {kind}: has no memory to read; use it in an EncoderDecoder")


def visible_memory(
    kind: str,
    inputs: MixerInputs,
    num_queries: int,  # T
) -> Bool[Array, "#B T S"]:
    """Return the mask of the memory, or of its copy in a `MemoryAttentionCache`.

    Raises:
      ValueError: there is neither.
    """
    check_has_memory(kind, inputs)
    memory = inputs.cache.values if inputs.memory is None else inputs.memory
    return memory_mask(inputs.mask, num_queries, memory.shape[1])


def keys_and_values(
    inputs: MixerInputs,
    new_keys: Float[Array, "B S A"] | None,  # of the memory; None without one
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array, MemoryAttentionCache | None]:
    """Return keys and values of the memory, and the cache that holds them.

    With a cache they are read from it in the first call too, so that all calls see the same digits.
    """
    memory, cache = inputs.memory, inputs.cache
    if cache is None:
        assert new_keys is not None and memory is not None  # noqa: PT018
        return new_keys, memory, None
    if new_keys is not None:
        cache = cache.append(new_keys, memory)
    return *cache.read(dtype), cache


def memory_mask(
    mask: Mask,
    num_queries: int,  # T
    memory_length: int,  # S
) -> Bool[Array, "#B T S"]:
    """Return the memory vectors that each token may attend to: those of its document."""
    segments = None if mask.key_segments is None else mask.segments
    of_memory = Mask(
        segments=segments, key_segments=mask.key_segments, key_lengths=mask.key_lengths
    )
    return dense_mask(of_memory, num_queries, memory_length)


def decoder_boundaries(inputs: MixerInputs) -> DocumentBoundaries | None:
    """Return the document boundaries of a decoder's tokens, without the lengths of its memory."""
    of_tokens = Mask(segments=inputs.mask.segments)
    return document_boundaries(of_tokens, inputs.positions, cached=inputs.cache is not None)


def init_lstm_state(
    module: nn.Module,
    vector: Float[Array, "B T D"],
    hidden_size: int,  # H
    context: ModelContext,
) -> LSTMState:  # [B, T, H] each
    """Declare the initial state from a vector m: h = tanh(W m + b), c = W' m + b'."""
    embed, hidden = {"embed": context.d_model}, {"hidden": hidden_size}
    first = apply_linear(module, "first_hidden", vector, embed, hidden, context, bias=True)
    cell = apply_linear(module, "first_cell", vector, embed, hidden, context, bias=True)
    return LSTMState(jnp.tanh(first), cell.astype(jnp.float32))


def first_token_state(
    initial_states: Any,  # leaves [B, T, ...]
) -> Any:  # leaves [B, ...]
    """Return the initial state of the document of the first token."""
    return jax.tree.map(lambda leaf: leaf[:, 0], initial_states)


def first_visible(
    memory: Real[Array, "B S D"],
    visible: Bool[Array, "#B T S"],
) -> Real[Array, "B T D"]:
    """Return the first memory vector that each token sees; zeros if it sees none."""
    return _gather_visible(memory, visible, jnp.argmax(visible, axis=-1))


def last_visible(
    memory: Real[Array, "B S D"],
    visible: Bool[Array, "#B T S"],
) -> Real[Array, "B T D"]:
    """Return the last memory vector that each token sees; zeros if it sees none."""
    index_from_end = jnp.argmax(jnp.flip(visible, axis=-1), axis=-1)
    return _gather_visible(memory, visible, visible.shape[-1] - 1 - index_from_end)


def _gather_visible(
    memory: Real[Array, "B S D"],
    visible: Bool[Array, "#B T S"],
    index: Int[Array, "#B T"],
) -> Real[Array, "B T D"]:
    index = jnp.broadcast_to(index, (memory.shape[0], index.shape[1]))
    gathered = jnp.take_along_axis(memory, index[:, :, None], axis=1)
    # argmax over no True is 0, which is a wrong vector where nothing is visible.
    return jnp.where(visible.any(axis=-1)[:, :, None], gathered, 0)


def attend_with_scores(
    scores: Float[Array, "B S"],
    visible: Bool[Array, "#B S"],
    values: Float[Array, "B S D"],
    softmax_dtype: str,
) -> tuple[Float[Array, "B D"], Float[Array, "B S"]]:
    """Return the softmax average of the visible values, and the weights."""
    scores = jnp.where(visible, scores.astype(softmax_dtype), jnp.finfo(softmax_dtype).min)
    weights = jnp.where(visible.any(axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1), 0)
    sum_dtype = accumulation_dtype(values.dtype, softmax_dtype)
    wide = weights.astype(sum_dtype)
    average = precise_einsum("BS,BSD->BD", wide, values, values.dtype, sum_dtype)
    return average.astype(values.dtype), weights

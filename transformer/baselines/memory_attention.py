"""Attention inside recurrent decoders: scores, masks and initial states from the memory.

`memory` is the output of an encoder, [B, S, D].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.document_boundaries import (
    DocumentBoundaries,
    document_boundaries,
)
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import MixerInputs, ScoreFlops
from transformer.baselines.cells import RECURRENT_INIT, LSTMState, apply_matrix, recurrent_weight
from transformer.layers.basic import apply_linear
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum
from transformer.model_context import ModelContext


class AdditiveScorer(NamedTuple):
    """score = v . tanh(W state + U memory) (Bahdanau et al. 2015, appendix A.1.2)."""

    query_matrix: jax.Array  # [H, A] W
    vector: jax.Array  # [A] v

    def scores(
        self,
        state: jax.Array,  # [B, H]
        keys: jax.Array,  # [B, S, A] U memory
    ) -> jax.Array:  # [B, S]
        hidden = jnp.tanh(apply_matrix(state, self.query_matrix)[:, None] + keys)
        return jnp.einsum("BSA,A->BS", hidden, self.vector)


def additive_scorer(
    module: nn.Module,
    state_size: int,  # H
    score_size: int,  # A
    context: ModelContext,
) -> AdditiveScorer:
    """Declare W and v."""
    score, init = {"score": score_size}, RECURRENT_INIT.matrix_initializer({"score": score_size})
    query = recurrent_weight(module, "score_query", {"state": state_size}, score, context)
    return AdditiveScorer(query, recurrent_weight(module, "score_vector", {}, score, context, init))


def project_additive_keys(
    module: nn.Module,
    memory: jax.Array,  # [B, S, D]
    score_size: int,  # A
    context: ModelContext,
) -> jax.Array:  # [B, S, A]
    """Declare U and return U memory."""
    embed, score = {"embed": memory.shape[-1]}, {"score": score_size}
    return apply_linear(module, "score_key", memory, embed, score, context, bias=False)


class MemoryAttentionCache(struct.PyTreeNode):
    """Recurrent state of a decoder, and the keys and values of its memory.

    The state keeps the dtypes of the recurrence; keys and values are stored in `dtype`.
    """

    state: Any  # leaves [B, ...]
    keys: jax.Array  # [B, S, A]
    values: jax.Array  # [B, S, D]

    @classmethod
    def empty(
        cls,
        state: Any,  # before the first token; leaves [B, ...]
        batch_size: int,  # B
        length: int,  # S
        key_size: int,  # A
        value_size: int,  # D
        dtype: Any,
    ) -> "MemoryAttentionCache":
        """Return a cache for a memory of `length` tokens."""
        shape = (batch_size, length)
        return cls(
            state, jnp.zeros((*shape, key_size), dtype), jnp.zeros((*shape, value_size), dtype)
        )

    def append(
        self,
        keys: jax.Array,  # [B, S, A]
        values: jax.Array,  # [B, S, D]
    ) -> "MemoryAttentionCache":
        """Return the cache filled with a memory, which replaces the old one."""
        return self.replace(
            keys=keys.astype(self.keys.dtype), values=values.astype(self.values.dtype)
        )

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array]:  # [B, S, A], [B, S, D]
        """Return the memory's keys and values in `dtype`."""
        return self.keys.astype(dtype), self.values.astype(dtype)


def memory_score_flops(score_size: int, width: int, length: int) -> ScoreFlops:
    """Count attention to the whole memory at each step, with or without a causal mask."""
    flops = 2 * (score_size + width) * length  # the scores, and the weighted average
    return ScoreFlops(full=flops, causal=flops)


def init_lstm_state(
    module: nn.Module,
    vector: jax.Array,  # [B, T, D]
    hidden_size: int,  # H
    context: ModelContext,
) -> LSTMState:  # [B, T, H] each
    """Declare the initial state from a vector m: h = tanh(W m + b), c = W' m + b'."""
    embed, hidden = {"embed": context.d_model}, {"hidden": hidden_size}
    first = apply_linear(module, "first_hidden", vector, embed, hidden, context, bias=True)
    cell = apply_linear(module, "first_cell", vector, embed, hidden, context, bias=True)
    return LSTMState(jnp.tanh(first), cell.astype(jnp.float32))


def check_has_memory(kind: str, memory: jax.Array | None, cache: Any) -> None:
    """Raise ValueError if there is neither a memory nor a cache that holds one."""
    if memory is None and cache is None:
        raise ValueError(f"mixer {kind}: has no memory to read; use it in an EncoderDecoder")


def needs_memory_cache_error(kind: str) -> ValueError:
    """Return the error for `init_cache` of a mixer whose cache holds a memory."""
    return ValueError(f"mixer {kind}: its cache is one for a memory; call init_memory_cache")


def decoder_boundaries(inputs: MixerInputs) -> DocumentBoundaries | None:
    """Return the document boundaries of a decoder's own tokens.

    The key lengths of its mask are those of the memory.
    """
    own = Mask(segments=inputs.mask.segments)
    return document_boundaries(own, inputs.positions, cached=inputs.cache is not None)


def visible_memory(
    kind: str,
    inputs: MixerInputs,
    cache: MemoryAttentionCache | None,
    num_queries: int,  # T
) -> jax.Array:  # [B or 1, T, S]
    """Return the mask of the memory, or of its cached copy.

    Raises:
      ValueError: there is neither.
    """
    check_has_memory(kind, inputs.memory, cache)
    memory = cache.values if inputs.memory is None and cache is not None else inputs.memory
    assert memory is not None
    return memory_mask(inputs.mask, num_queries, memory.shape[1])


def keys_and_values(
    cache: MemoryAttentionCache | None,
    new_keys: jax.Array | None,  # [B, S, A]; None: no new memory
    memory: jax.Array | None,  # [B, S, D]
    dtype: Any,
) -> tuple[jax.Array, jax.Array, MemoryAttentionCache | None]:
    """Return keys and values of the memory, and the cache that holds them.

    With a cache they are read from it in the first call too, so that all calls see the same digits.
    """
    if cache is None:
        assert new_keys is not None and memory is not None  # noqa: PT018
        return new_keys, memory, None
    if new_keys is not None and memory is not None:
        cache = cache.append(new_keys, memory)
    return *cache.read(dtype), cache


def memory_mask(
    mask: Mask,
    num_queries: int,  # T
    memory_length: int,  # S
) -> jax.Array:  # [B or 1, T, S]
    """Return the memory vectors that each token may attend to: those of its document."""
    segments = None if mask.key_segments is None else mask.segments
    own = Mask(segments=segments, key_segments=mask.key_segments, key_lengths=mask.key_lengths)
    return dense_mask(own, num_queries, memory_length)


def first_visible(
    memory: jax.Array,  # [B, S, D]
    visible: jax.Array,  # [B or 1, T, S]
) -> jax.Array:  # [B, T, D]
    """Return the first memory vector that each token sees; zeros if it sees none."""
    return _gather_visible(memory, visible, jnp.argmax(visible, axis=-1))


def last_visible(
    memory: jax.Array,  # [B, S, D]
    visible: jax.Array,  # [B or 1, T, S]
) -> jax.Array:  # [B, T, D]
    """Return the last memory vector that each token sees; zeros if it sees none."""
    index_from_end = jnp.argmax(jnp.flip(visible, axis=-1), axis=-1)
    return _gather_visible(memory, visible, visible.shape[-1] - 1 - index_from_end)


def _gather_visible(memory: jax.Array, visible: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(index, (memory.shape[0], index.shape[1]))
    gathered = jnp.take_along_axis(memory, index[:, :, None], axis=1)
    # argmax over no True is 0, which is a wrong vector where nothing is visible.
    return jnp.where(visible.any(axis=-1)[:, :, None], gathered, 0)


def first_token_state(
    initial_states: Any,  # leaves [B, T, ...]
) -> Any:  # leaves [B, ...]
    """Return the initial state of the document of the first token."""
    return jax.tree.map(lambda leaf: leaf[:, 0], initial_states)


def attend_with_scores(
    scores: jax.Array,  # [B, S]
    visible: jax.Array,  # [B or 1, S]
    values: jax.Array,  # [B, S, D]
    softmax_dtype: str,
) -> tuple[jax.Array, jax.Array]:  # [B, D], [B, S]
    """Return the softmax average of the visible values, and the weights."""
    scores = jnp.where(visible, scores.astype(softmax_dtype), jnp.finfo(softmax_dtype).min)
    weights = jnp.where(visible.any(axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1), 0)
    sum_dtype = accumulation_dtype(values.dtype, softmax_dtype)
    wide = weights.astype(sum_dtype)
    average = precise_einsum("BS,BSD->BD", wide, values, values.dtype, sum_dtype)
    return average.astype(values.dtype), weights

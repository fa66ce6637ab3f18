"""Attention inside recurrent decoders: scores, masks and initial states from the memory.

`memory` is the output of an encoder, [B, S, D].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.base import ScoreFlops
from transformer.attention.masks import Mask, dense_mask
from transformer.baselines.cells import RECURRENT_INIT, LSTMState, apply_matrix, recurrent_weight
from transformer.context import ModelContext
from transformer.layers.basic import apply_linear
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum
from transformer.precision import finfo_min


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
    """State of the recurrence, and the projected memory."""

    state: Any  # leaves [B, ...]
    keys: jax.Array  # [B, S, A]
    values: jax.Array  # [B, S, D]


def memory_score_flops(score: int, width: int, length: int) -> ScoreFlops:
    """Count attention to the whole memory at each step, with or without a causal mask."""
    both = score + width  # a score, and its share of the average
    return ScoreFlops(full=2 * both * length, causal=2 * both * length)


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
    return ValueError(f"mixer {kind}: its cache holds a memory; ask init_memory_cache for one")


def memory_vectors(
    kind: str,
    memory: jax.Array | None,  # [B, S, D]
    cache: MemoryAttentionCache | None,
) -> jax.Array:  # [B, S, D]
    """Return the memory, or its cached copy. Raise ValueError if there is neither."""
    check_has_memory(kind, memory, cache)
    if memory is not None:
        return memory
    assert cache is not None
    return cache.values


def memory_mask(
    mask: Mask,
    num_queries: int,  # T
    memory_length: int,  # S
) -> jax.Array:  # [B or 1, T, S]
    """Return the memory vectors that each token may attend to: those of its document."""
    segments = None if mask.key_segments is None else mask.segments
    theirs = Mask(segments=segments, key_segments=mask.key_segments, key_lengths=mask.key_lengths)
    return dense_mask(theirs, num_queries, memory_length)


def first_visible(
    memory: jax.Array,  # [B, S, D]
    visible: jax.Array,  # [B or 1, T, S]
) -> jax.Array:  # [B, T, D]
    """Return the first memory vector that each token sees; zeros if it sees none."""
    return _picked(memory, visible, jnp.argmax(visible, axis=-1))


def last_visible(
    memory: jax.Array,  # [B, S, D]
    visible: jax.Array,  # [B or 1, T, S]
) -> jax.Array:  # [B, T, D]
    """Return the last memory vector that each token sees; zeros if it sees none."""
    from_the_end = jnp.argmax(jnp.flip(visible, axis=-1), axis=-1)
    return _picked(memory, visible, visible.shape[-1] - 1 - from_the_end)


def _picked(memory: jax.Array, seen: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(index, (memory.shape[0], index.shape[1]))
    picked = jnp.take_along_axis(memory, index[:, :, None], axis=1)
    return jnp.where(seen.any(axis=-1)[:, :, None], picked, 0)


def first_token_state(
    initial_states: Any,  # leaves [B, T, ...]
) -> Any:  # leaves [B, ...]
    """Return the initial state of the document of the first token."""
    return jax.tree.map(lambda leaf: leaf[:, 0], initial_states)


def attend_with_scores(
    scores: jax.Array,  # [B, S]
    visible: jax.Array,  # [B or 1, S]
    values: jax.Array,  # [B, S, D]
    softmax_dtype: str,  # of the softmax
) -> tuple[jax.Array, jax.Array]:  # [B, D], [B, S]
    """Return the softmax average of the visible values, and the weights."""
    scores = jnp.where(visible, scores.astype(softmax_dtype), finfo_min(softmax_dtype))
    weights = jnp.where(visible.any(axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1), 0)
    sums = accumulation_dtype(values.dtype, softmax_dtype)
    found = precise_einsum("BS,BSD->BD", weights.astype(sums), values, values.dtype, sums)
    return found.astype(values.dtype), weights

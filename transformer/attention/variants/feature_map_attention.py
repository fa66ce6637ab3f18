"""Attention by feature maps: masks, caches and cross attention of its mixers.

The weight of a key is a dot product of features, phi(q) . phi(k), in place of exp(q . k). The
papers call such a function of q and k a kernel; here the word is left to programs of GPUs and TPUs.
Linear attention and Performer differ only in their feature map.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer.attention.document_boundaries import (
    DocumentBoundaries,
    document_boundaries,
    token_segments,
)
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Mixer,
    MixerInputs,
    ScoreFlops,
    reject_mask_patterns,
    reject_weights,
)
from transformer.attention.projections import (
    MultiHeadConfig,
    project_keys,
    project_qkv,
    project_queries,
    project_values,
)
from transformer.attention.variants.prefix_sums import (
    ACCUMULATION_DTYPE,
    FeatureMap,
    LinearAttentionState,
    attend_causal,
    read_state,
    sum_keys,
)
from transformer.taps import Outputs


class LinearAttentionMemory(struct.PyTreeNode):
    """Cross-attention cache: the sums over a memory of one document."""

    state: LinearAttentionState

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        num_kv_heads: int,  # K
        num_features: int,  # M
        head_dim: int,  # H
    ) -> "LinearAttentionMemory":
        """Return the sums over a memory without tokens."""
        return cls(LinearAttentionState.empty(batch_size, num_kv_heads, num_features, head_dim))


def feature_map_flops(
    config: MultiHeadConfig,
    width: int,  # D
    num_features: int,  # M
    num_random_vectors: int,  # random vectors that each query and key is multiplied by; 0: none
) -> ScoreFlops:
    """Count FLOPs of features, of their sums with values and of reading them; independent of T."""
    head_dim = config.resolved_head_dim(width)
    flops = (config.num_heads + config.resolved_num_kv_heads) * (
        num_random_vectors * head_dim + num_features * (head_dim + 1)
    )
    return ScoreFlops(full=2 * flops, causal=2 * flops)


def attend_with_feature_map(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    inputs: MixerInputs,
) -> tuple[jax.Array, Any]:  # [B, T, N, H], the cache
    """Declare the query, key and value projections of `module` and attend by features.

    Under a causal mask, each document must be contiguous in its row.

    Raises:
      ValueError: attention weights are requested, the mask is more than causality, segments and
        lengths, or a cache is given without a causal mask.
    """
    config, context = module.config, module.context
    mask, memory, cache = inputs.mask, inputs.memory, inputs.cache
    _check_supported(config, mask, inputs.outputs)
    if memory is not None or isinstance(cache, LinearAttentionMemory):
        if mask.pattern.causal or isinstance(cache, LinearAttentionState):
            raise ValueError(
                f"mixer {config.kind}: attends to the whole memory; give a mask that is not "
                "causal, and no cache or one from init_memory_cache"
            )
        return _attend_memory(module, x, feature_map, mask, memory, cache)
    q, k, v = project_qkv(module, x, inputs.positions, config, context, position=config.position)
    if not mask.pattern.causal:
        if cache is not None:
            raise ValueError(
                f"mixer {config.kind}: decoding with a cache needs a causal mask; give one"
            )
        return attend_bidirectional(q, k, v, feature_map, mask), None
    boundaries = document_boundaries(mask, inputs.positions, cached=cache is not None)
    y, state = attend_causal(q, k, v, feature_map, boundaries, cache)
    if mask.segments is not None:
        # Padding queries read the sums of the document before them.
        y = jnp.where((mask.segments != 0)[:, :, None, None], y, 0)
    return y, None if cache is None else state


def _check_supported(config: MultiHeadConfig, mask: Mask, outputs: Outputs) -> None:
    reject_weights(config.kind, outputs)
    if not mask.pattern.causal:  # sums over all keys do not depend on the order of tokens
        mask = mask.replace(pattern=dataclasses.replace(mask.pattern, ordered=True))
    reject_mask_patterns(config.kind, mask)


def _attend_memory(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    mask: Mask,
    memory: jax.Array | None,  # [B, S, D]
    cache: Any,  # LinearAttentionMemory; None only if there is a memory
) -> tuple[jax.Array, LinearAttentionMemory | None]:
    config, context = module.config, module.context
    q = project_queries(module, x, config, context)
    if memory is not None:
        k, v = (heads(module, memory, config, context) for heads in (project_keys, project_values))
        if cache is None:
            return attend_bidirectional(q, k, v, feature_map, mask), None
        state = _sum_all_keys(k, v, feature_map, _key_segments(mask, k.shape[1]))
        cache = cache.replace(state=state)
    return read_state(feature_map(q.astype(ACCUMULATION_DTYPE)), cache.state).astype(q.dtype), cache


def attend_bidirectional(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    mask: Mask,
) -> jax.Array:  # [B, T, N, H of values]
    """Attend from each query to all keys of its document; packed rows cost a causal pass."""
    key_segments = _key_segments(mask, k.shape[1])

    def attend_all() -> jax.Array:
        state = _sum_all_keys(k, v, feature_map, key_segments)
        return read_state(feature_map(q.astype(ACCUMULATION_DTYPE)), state).astype(v.dtype)

    if mask.segments is None or key_segments is None:
        return attend_all()
    # One sum over the row serves all queries only if the row holds one document (and padding, in
    # any place). Segments are data, so the choice is made at run time.
    query_segments, document = mask.segments, key_segments.max(axis=1, keepdims=True)
    has_single_documents = jnp.all((key_segments == document) | (key_segments == 0))
    is_of_document = ((query_segments == document) & (document != 0))[:, :, None, None]
    return jax.lax.cond(
        has_single_documents,
        lambda: jnp.where(is_of_document, attend_all(), 0),
        lambda: _attend_sorted_by_document(q, k, v, feature_map, query_segments, key_segments),
    )


def _sum_all_keys(
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    key_segments: jax.Array | None,  # [B or 1, S]; 0 is padding
) -> LinearAttentionState:
    """Sum over all keys except padding."""
    is_token = None if key_segments is None else key_segments != 0
    return sum_keys(feature_map(k.astype(ACCUMULATION_DTYPE)), v, is_token)


def _key_segments(mask: Mask, length: int) -> jax.Array | None:  # [B or 1, S]
    """Return the document of each key, 0 for padding; None if all keys are in one document."""
    if mask.segments is None:
        return token_segments(mask, length)
    own = mask.segments if mask.key_segments is None else mask.key_segments
    return token_segments(mask.replace(segments=own), length)


def _attend_sorted_by_document(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    query_segments: jax.Array,  # [B or 1, T]
    key_segments: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B, T, N, H of values]
    """Sort tokens by document with keys before queries, then run a causal pass.

    In that order every query comes after all keys of its document, so it sees all of them.
    """
    batch, num_keys, num_queries = q.shape[0], k.shape[1], q.shape[1]
    keys_then_queries = [
        jnp.broadcast_to(each, (batch, each.shape[1])) for each in (key_segments, query_segments)
    ]
    segments = jnp.concatenate(keys_then_queries, axis=1)
    order = jnp.argsort(segments, axis=1, stable=True)  # stable: keys stay before queries

    def sort_padded(x: jax.Array, before: int, after: int) -> jax.Array:
        # Every row of the pass has a query and a key: zeros for what a token does not have.
        x = jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))
        return jnp.take_along_axis(x, order[:, :, None, None], axis=1)

    q = sort_padded(q, num_keys, 0)
    k, v = sort_padded(k, 0, num_queries), sort_padded(v, 0, num_queries)
    segments = jnp.take_along_axis(segments, order, axis=1)
    is_start = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    # Queries are not tokens of the pass: they read the sums and add nothing to them.
    is_key = (segments != 0) & (order < num_keys)
    y, _ = attend_causal(q, k, v, feature_map, DocumentBoundaries(is_start, is_key))
    inverse_order = jnp.argsort(order, axis=1)[:, num_keys:]
    return jnp.take_along_axis(y, inverse_order[:, :, None, None], axis=1)

"""Shared parts of kernel attention mixers: masks, caches and cross attention.

Linear attention and Performer differ only in their feature map.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer.attention.base import (
    Mixer,
    MixerInputs,
    Outputs,
    ScoreFlops,
    reject_mask_patterns,
    reject_weights,
)
from transformer.attention.config import MultiHeadConfig
from transformer.attention.masks import Mask
from transformer.attention.projections import (
    project_keys,
    project_qkv,
    project_queries,
    project_values,
)
from transformer.attention.token_segments import token_segments
from transformer.attention.variants.prefix_sums import (
    ACCUMULATION_DTYPE,
    FeatureMap,
    KernelState,
    attend_causal,
    read_state,
    sum_keys,
)
from transformer.baselines.cells import DocumentBoundaries, document_boundaries


class MemoryKernelState(struct.PyTreeNode):
    """Cross-attention cache: the sums over a memory of one document."""

    state: KernelState


def kernel_score_flops(
    config: MultiHeadConfig,
    width: int,  # D
    features: int,  # M
    directions: int,  # random vectors that each query and key meets; 0: none
) -> ScoreFlops:
    """Count FLOPs of features, of their sums with values and of reading them; independent of T."""
    head = config.resolved_head_dim(width)
    each = (config.num_heads + config.resolved_num_kv_heads) * (
        directions * head + features * (head + 1)
    )
    return ScoreFlops(full=2 * each, causal=2 * each)


def attend_with_kernel(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    inputs: MixerInputs,
) -> tuple[jax.Array, Any]:  # [B, T, N, H], the cache
    """Declare the query, key and value projections of `module` and apply kernel attention.

    Under a causal mask, each document must be contiguous in its row.

    Raises:
      ValueError: attention weights are requested, the mask is more than causality, segments and
        lengths, or a cache is given without a causal mask.
    """
    config, context = module.config, module.context
    mask, memory, cache = inputs.mask, inputs.memory, inputs.cache
    _check_supported(config, mask, inputs.outputs)
    if memory is not None or isinstance(cache, MemoryKernelState):
        if mask.pattern.causal or isinstance(cache, KernelState):
            raise ValueError(
                f"mixer {config.kind}: looks at a memory as a whole; give a mask that is not "
                "causal, and a cache of init_memory_cache or none"
            )
        return _attend_memory(module, x, feature_map, mask, memory, cache)
    q, k, v = project_qkv(module, x, inputs.positions, config, context)
    if not mask.pattern.causal:
        if cache is not None:
            raise ValueError(f"mixer {config.kind}: decodes under a causal mask alone; give one")
        return attend_bidirectional(q, k, v, feature_map, mask), None
    line = document_boundaries(mask, inputs.positions, cached=cache is not None)
    y, sums = attend_causal(q, k, v, feature_map, line, cache)
    if mask.segments is not None:
        y = jnp.where((mask.segments != 0)[:, :, None, None], y, 0)
    return y, None if cache is None else sums


def _check_supported(config: MultiHeadConfig, mask: Mask, outputs: Outputs) -> None:
    reject_weights(config.kind, outputs)
    if not mask.pattern.causal:  # then their order does not matter
        mask = mask.replace(pattern=dataclasses.replace(mask.pattern, ordered=True))
    reject_mask_patterns(config.kind, mask)


def _attend_memory(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    mask: Mask,
    memory: jax.Array | None,  # [B, S, D]
    cache: Any,  # MemorySums, if there is no memory
) -> tuple[jax.Array, MemoryKernelState | None]:
    config, context = module.config, module.context
    q = project_queries(module, x, config, context)
    if memory is not None:
        k, v = (heads(module, memory, config, context) for heads in (project_keys, project_values))
        if cache is None:
            return attend_bidirectional(q, k, v, feature_map, mask), None
        cache = MemoryKernelState(_sum_all_keys(k, v, feature_map, _key_segments(mask, k.shape[1])))
    return read_state(feature_map(q.astype(ACCUMULATION_DTYPE)), cache.state).astype(q.dtype), cache


def attend_bidirectional(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    mask: Mask,
) -> jax.Array:  # [B, T, N, H of values]
    """Attend from each query to all keys of its document; packed rows cost a causal pass."""
    theirs = _key_segments(mask, k.shape[1])

    def whole() -> jax.Array:
        sums = _sum_all_keys(k, v, feature_map, theirs)
        return read_state(feature_map(q.astype(ACCUMULATION_DTYPE)), sums).astype(v.dtype)

    if mask.segments is None or theirs is None:
        return whole()
    ours, only = mask.segments, theirs.max(axis=1, keepdims=True)
    alike = jnp.all((theirs == only) | (theirs == 0))
    seeing = ((ours == only) & (only != 0))[:, :, None, None]
    return jax.lax.cond(
        alike,
        lambda: jnp.where(seeing, whole(), 0),
        lambda: _attend_sorted_by_document(q, k, v, feature_map, ours, theirs),
    )


def _sum_all_keys(
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    theirs: jax.Array | None,  # [B or 1, S]
) -> KernelState:
    """Sum over all keys except padding."""
    return sum_keys(
        feature_map(k.astype(ACCUMULATION_DTYPE)), v, None if theirs is None else theirs != 0
    )


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
    ours: jax.Array,  # [B or 1, T]
    theirs: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B, T, N, H of values]
    """Sort tokens by document with keys before queries, then run a causal pass.

    In that order every query comes after all keys of its document, so it sees all of them.
    """
    batch, keys, queries = q.shape[0], k.shape[1], q.shape[1]
    each = [jnp.broadcast_to(one, (batch, one.shape[1])) for one in (theirs, ours)]
    numbers = jnp.concatenate(each, axis=1)
    order = jnp.argsort(numbers, axis=1, stable=True)

    def placed(x: jax.Array, before: int, after: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))
        return jnp.take_along_axis(x, order[:, :, None, None], axis=1)

    q, k, v = placed(q, keys, 0), placed(k, 0, queries), placed(v, 0, queries)
    numbers = jnp.take_along_axis(numbers, order, axis=1)
    begins = numbers != jnp.pad(numbers, ((0, 0), (1, 0)))[:, :-1]
    line = DocumentBoundaries(begins, (numbers != 0) & (order < keys))
    y, _ = attend_causal(q, k, v, feature_map, line)
    back = jnp.argsort(order, axis=1)[:, keys:]
    return jnp.take_along_axis(y, back[:, :, None, None], axis=1)

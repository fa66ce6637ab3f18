"""What mixers of kernel attention have in common: which keys a query reads, and what is kept.

They differ in their maps from queries and keys to features alone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer.documents import documents
from transformer.heads import HeadsConfig, key_heads, project, query_heads, value_heads
from transformer.masks import Mask
from transformer.mixers import Mixer, MixerInputs, Outputs, ScoreFlops
from transformer.recurrent.scan import Timeline, timeline
from transformer.refusals import refuse_patterns, refuse_weights
from transformer.variants.prefix_sums import DTYPE, FeatureMap, Sums, causal, read, sum_all


class MemorySums(struct.PyTreeNode):
    """Sums over a memory of one document: what one layer of cross attention keeps of it."""

    sums: Sums


def kernel_score_flops(
    config: HeadsConfig,
    width: int,  # D
    features: int,  # M
    directions: int,  # random vectors that each query and key meets; 0: none
) -> ScoreFlops:
    """Features, their sums with values, and what a query reads of them, at whatever length."""
    head = config.query_width(width)
    each = (config.heads + config.key_heads) * (directions * head + features * (head + 1))
    return ScoreFlops(full=2 * each, causal=2 * each)


def attend_by_kernel(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    inputs: MixerInputs,
) -> tuple[jax.Array, Any]:  # [B, T, N, H], the cache
    """Declares the weights of queries, keys and values of `module`, and applies them.

    Under a causal mask the documents of a row are contiguous. Raises ValueError for weights, for
    masks of more than causality, segments and lengths, and for a cache without a causal mask.
    """
    config, shared = module.config, module.shared
    mask, memory, cache = inputs.mask, inputs.memory, inputs.cache
    _refuse(config, mask, inputs.outputs)
    if memory is not None or isinstance(cache, MemorySums):
        if mask.pattern.causal or isinstance(cache, Sums):
            raise ValueError(
                f"mixer {config.kind}: looks at a memory as a whole; give a mask that is not "
                "causal, and a cache of init_memory_cache or none"
            )
        return _of_memory(module, x, feature_map, mask, memory, cache)
    q, k, v = project(module, x, inputs.positions, config, shared)
    if not mask.pattern.causal:
        if cache is not None:
            raise ValueError(f"mixer {config.kind}: decodes under a causal mask alone; give one")
        return everywhere(q, k, v, feature_map, mask), None
    line = timeline(mask, inputs.positions, cached=cache is not None)
    y, sums = causal(q, k, v, feature_map, line, cache)
    if mask.segments is not None:
        y = jnp.where((mask.segments != 0)[:, :, None, None], y, 0)
    return y, None if cache is None else sums


def _refuse(config: HeadsConfig, mask: Mask, outputs: Outputs) -> None:
    refuse_weights(config.kind, outputs)
    if not mask.pattern.causal:  # then their order does not matter
        mask = mask.replace(pattern=dataclasses.replace(mask.pattern, ordered=True))
    refuse_patterns(config.kind, mask)


def _of_memory(
    module: Mixer,
    x: jax.Array,  # [B, T, D]
    feature_map: FeatureMap,
    mask: Mask,
    memory: jax.Array | None,  # [B, S, D]
    cache: Any,  # MemorySums, if there is no memory
) -> tuple[jax.Array, MemorySums | None]:
    config, shared = module.config, module.shared
    q = query_heads(module, x, config, shared)
    if memory is not None:
        k, v = (heads(module, memory, config, shared) for heads in (key_heads, value_heads))
        if cache is None:
            return everywhere(q, k, v, feature_map, mask), None
        cache = MemorySums(_whole(k, v, feature_map, _theirs(mask, k.shape[1])))
    return read(feature_map(q.astype(DTYPE)), cache.sums).astype(q.dtype), cache


def everywhere(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    mask: Mask,
) -> jax.Array:  # [B, T, N, H of values]
    """Each query reads all keys of its document. Rows of several documents cost a causal pass."""
    theirs = _theirs(mask, k.shape[1])

    def whole() -> jax.Array:
        sums = _whole(k, v, feature_map, theirs)
        return read(feature_map(q.astype(DTYPE)), sums).astype(v.dtype)

    if mask.segments is None or theirs is None:
        return whole()
    ours, only = mask.segments, theirs.max(axis=1, keepdims=True)
    alike = jnp.all((theirs == only) | (theirs == 0))
    seeing = ((ours == only) & (only != 0))[:, :, None, None]
    return jax.lax.cond(
        alike,
        lambda: jnp.where(seeing, whole(), 0),
        lambda: _by_document(q, k, v, feature_map, ours, theirs),
    )


def _whole(
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    theirs: jax.Array | None,  # [B or 1, S]
) -> Sums:
    """Over all keys but padding."""
    return sum_all(feature_map(k.astype(DTYPE)), v, None if theirs is None else theirs != 0)


def _theirs(mask: Mask, length: int) -> jax.Array | None:  # [B or 1, S]
    """Documents of the keys, 0 for padding; None: all are of one."""
    if mask.segments is None:
        return documents(mask, length)
    own = mask.segments if mask.key_segments is None else mask.key_segments
    return documents(mask.replace(segments=own), length)


def _by_document(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    feature_map: FeatureMap,
    ours: jax.Array,  # [B or 1, T]
    theirs: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B, T, N, H of values]
    """Keys and queries sorted by document, in each the keys first: then a causal pass sees all."""
    batch, keys, queries = len(q), k.shape[1], q.shape[1]
    each = [jnp.broadcast_to(one, (batch, one.shape[1])) for one in (theirs, ours)]
    numbers = jnp.concatenate(each, axis=1)
    order = jnp.argsort(numbers, axis=1, stable=True)

    def placed(x: jax.Array, before: int, after: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))
        return jnp.take_along_axis(x, order[:, :, None, None], axis=1)

    q, k, v = placed(q, keys, 0), placed(k, 0, queries), placed(v, 0, queries)
    numbers = jnp.take_along_axis(numbers, order, axis=1)
    begins = numbers != jnp.pad(numbers, ((0, 0), (1, 0)))[:, :-1]
    line = Timeline(begins, (numbers != 0) & (order < keys))
    y, _ = causal(q, k, v, feature_map, line)
    back = jnp.argsort(order, axis=1)[:, keys:]
    return jnp.take_along_axis(y, back[:, :, None, None], axis=1)

"""Sparse Transformer: attention factorized into a local and a far component (Child et al. 2019).

Distances and blocks are measured in positions, which restart in every document. The far component
is computed by gathering:
- strided: tokens with the same position modulo the stride form a sequence of their own;
- fixed: the summary tokens of all blocks form a short list of keys.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.tiling import (
    PartialAttention,
    Tiling,
    merge_partials,
    pad_mask,
    tile_mask,
    widen,
)
from transformer.attention.cache import KVCache
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.projections import QKV, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.attention.sparse_ops.query_blocks import QUERY_BLOCK_SIZE, map_query_blocks
from transformer.attention.sparse_ops.visible_key_counts import sparse_transformer_visible_keys
from transformer.attention.variants.sparse_configs import (
    HEAD_GROUPS,
    Factorization,
    SparsePattern,
    SparseTransformerConfig,
)
from transformer.taps import HEAD_OUTPUTS

AttendFn = Callable[[jax.Array, jax.Array, jax.Array, ScoreSpec], PartialAttention]


def pattern_mask(
    pattern: SparsePattern,
    stride: int,
    num_summary_tokens: int,
    component: Factorization,
    query_positions: jax.Array,  # [B or 1, T] positions
    key_positions: jax.Array,  # [B or 1, S] positions
) -> jax.Array:  # [B or 1, T, S] booleans
    """Return the keys that a component shows, before any other mask (equations 3 and 4)."""
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    if pattern == "strided":
        near, distant = jnp.abs(q - k) <= stride, (q - k) % stride == 0
    else:
        near = q // stride == k // stride
        distant = jnp.broadcast_to(_is_summary(k, stride, num_summary_tokens), near.shape)
    return {"local": near, "far": distant, "merged": near | distant}[component]


def local_mask(pattern: SparsePattern, stride: int, mask: Mask, length: int) -> Mask:
    """Return the mask of the local component: a window (strided) or the own block (fixed)."""
    if pattern == "strided":
        return _with(mask, window=stride + 1)
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    block = mask.resolved_positions(length, length)[0] // stride
    # Each block of each document is a segment of its own.
    own = jnp.where(segments == 0, 0, 1 + segments * (length // stride + 2) + block)
    return _with(mask, window=stride).replace(segments=own)


def far_attention(
    pattern: SparsePattern, stride: int, num_summary_tokens: int, mask: Mask, *, exclude_local: bool
) -> list[AttendFn]:
    """Return functions that compute the far component.

    One function, or two (keys before and after the query) when `exclude_local` is set without a
    causal mask. `exclude_local` removes the keys of the local component, so that merging does not
    count them twice.
    """
    # Without the local keys, the far keys of a bidirectional query are two ranges, one on each
    # side: a causal mask describes one of them at a time.
    directions = [1] if mask.pattern.causal else [1, -1]
    if not exclude_local and not mask.pattern.causal:
        directions = [0]

    def one(direction: int) -> AttendFn:
        def look(q: jax.Array, k: jax.Array, v: jax.Array, scoring: ScoreSpec) -> PartialAttention:
            if pattern == "strided":
                return _columns(stride, direction, exclude_local, mask, q, k, v, scoring)
            return _summaries(
                stride, num_summary_tokens, direction, exclude_local, mask, q, k, v, scoring
            )

        return look

    return [one(direction) for direction in directions]


def _columns(
    stride: int,
    direction: int,  # 1: keys behind, -1: keys ahead, 0: both
    exclude_local: bool,
    mask: Mask,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    scoring: ScoreSpec,
) -> PartialAttention:
    """Attend at distances that are multiples of the stride, as rows of T / stride tokens."""
    batch, length = q.shape[:2]
    rows = -(-length // stride)

    # Tokens at multiples of the stride become one row, in which the pattern is a plain causal mask
    # whose future tiles are skipped.
    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B stride, rows, ...]
        width = [(0, 0)] * x.ndim
        width[1] = (0, rows * stride - length)
        x = jnp.pad(x, width).reshape(x.shape[0], rows, stride, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(-1, rows, *x.shape[3:])

    segments = _documents(mask, batch, length)
    index = jnp.arange(rows)[None, :]
    least = 2 if exclude_local else 0  # in strides: what is nearer is in the local part
    # Positions negated look ahead; positions lowered by `least` hide that many nearest keys.
    within = Mask(
        MaskPattern(causal=direction != 0),
        positions=direction * index - least if direction else index,
        segments=split(segments),
    )
    within = within.replace(key_positions=direction * index if direction else index)
    y, lse = attend_blockwise(split(q), split(k), split(v), within, scoring)

    def unsplit(x: jax.Array) -> jax.Array:  # [B stride, rows, ...] -> [B, T, ...]
        x = x.reshape(batch, stride, rows, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(batch, rows * stride, *x.shape[3:])[:, :length]

    return PartialAttention(unsplit(y), unsplit(lse.swapaxes(1, 2)).swapaxes(1, 2))


def _summaries(
    stride: int,
    summary: int,
    direction: int,  # 1: keys behind, -1: keys ahead, 0: both
    exclude_local: bool,
    mask: Mask,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    scoring: ScoreSpec,
) -> PartialAttention:
    """Attend to the gathered summary tokens of all blocks.

    If documents start at position 0, there are at most T * c / stride of them, for c tokens per
    block. A document that continues from an earlier row may start elsewhere: the row can then
    begin and end within summary tokens, which adds c (stride - c) / stride more.
    """
    batch, length = q.shape[:2]
    positions = jnp.broadcast_to(mask.resolved_positions(length, length)[0], (batch, length))
    segments = _documents(mask, batch, length)
    is_summary = _is_summary(positions, stride, summary) & (segments != 0)
    # The most summary tokens that a row can have: shapes are static, their number is not.
    count = min(length, summary * (length + stride - summary) // stride)
    # A stable sort puts them first and keeps their order; other tokens fill the rest, hidden by
    # segment 0.
    chosen = jnp.argsort(~is_summary, axis=1, stable=True)[:, :count]  # [B, count]
    k, v = (jnp.take_along_axis(each, chosen[:, :, None, None], axis=1) for each in (k, v))
    pick = lambda x: jnp.take_along_axis(x, chosen, axis=1)  # noqa: E731
    summary_positions = pick(positions)
    mask_of_summaries = Mask(
        segments=segments,
        key_segments=jnp.where(pick(is_summary), pick(segments), 0),
        positions=positions,
        key_positions=summary_positions,
    )
    if exclude_local:
        # By block, not by token: the whole own block is in the local component already.
        own, other = positions // stride, summary_positions // stride
        mask_of_summaries = mask_of_summaries.replace(
            pattern=MaskPattern(causal=True),
            positions=direction * own - 1,
            key_positions=direction * other,
        )
    elif direction:
        mask_of_summaries = mask_of_summaries.replace(pattern=MaskPattern(causal=True))
    return attend_blockwise(q, k, v, mask_of_summaries, scoring)


def _documents(mask: Mask, batch: int, length: int) -> jax.Array:  # [B, T]
    """Return segments with 0 for padding."""
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    if mask.key_lengths is not None:
        segments = segments * (jnp.arange(length)[None, :] < mask.key_lengths[:, None])
    return jnp.broadcast_to(segments, (batch, length))


def _is_summary(positions: jax.Array, stride: int, summary: int) -> jax.Array:
    return positions % stride >= stride - summary


def _with(mask: Mask, *, window: int) -> Mask:
    return mask.replace(pattern=dataclasses.replace(mask.pattern, window=window))


@register_mixer
class SparseTransformer(Mixer):
    """Softmax over both components, or one component for each half of the heads."""

    config: SparseTransformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: SparseTransformerConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: SparseTransformerConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: SparseTransformerConfig, width: int, length: int) -> ScoreFlops:
        return sparse_transformer_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        config = self.config
        head_dim = config.resolved_head_dim(self.context.d_model)
        dtype = self.context.precision.cache_dtype
        return KVCache.empty(batch, length, config.resolved_num_kv_heads, head_dim, dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a cache, all cached keys are scored and then masked."""
        config, mask, cache = self.config, inputs.mask, inputs.cache
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, mask)
        q, k, v = self.project(x, inputs)
        mask = mask.replace(positions=inputs.positions)
        if cache is not None:
            cache = cache.append(k, v, inputs.positions)
            k, v, key_positions = cache.read(q.dtype)
            mask = mask.with_keys(key_positions, keys_include_queries=True)
        look: Any = self.attend_uncached if cache is None else self.attend_cached
        groups = zip(*(self.split_head_groups(each) for each in (q, k, v)), strict=True)
        components = [
            look(part, *group, mask)
            for part, group in zip(HEAD_GROUPS[config.factorization], groups, strict=True)
        ]
        y = jnp.concatenate(components, axis=2)
        return combine_heads(self, y, inputs, cache)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(
            self, x, inputs.positions, self.config, self.context, position=self.config.position
        )

    @nn.nowrap
    def split_head_groups(self, heads: jax.Array) -> list[jax.Array]:  # [B, T, N, H]
        """Split the heads into one group per component."""
        return jnp.split(heads, len(HEAD_GROUPS[self.config.factorization]), axis=2)

    @nn.nowrap
    def attend_uncached(
        self,
        component: Factorization,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, T, K, H]
        v: jax.Array,  # [B, T, K, H]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """Compute the components separately and merge them into one softmax."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = widen(self.score_spec(q), q, k, v)
        # Not rounded before the merge, and gradients of the components are added before rounding.
        parts: list[PartialAttention] = []
        if component in ("local", "merged"):
            nearby = local_mask(config.pattern, config.stride, mask, q.shape[1])
            tile = self.context.hardware.tile_size
            parts.append(attend_blockwise(q, k, v, nearby, scoring, block_size=tile))
        if component in ("far", "merged"):
            exclude_local = component == "merged"
            for each in far_attention(
                config.pattern,
                config.stride,
                config.num_summary_tokens,
                mask,
                exclude_local=exclude_local,
            ):
                parts.append(each(q, k, v, scoring))
        return merge_partials(parts).y.astype(dtype)

    @nn.nowrap
    def attend_cached(
        self,
        component: Factorization,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, S, K, H]
        v: jax.Array,  # [B, S, K, H]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """Attend to all cached keys with a dense mask, one block of queries at a time."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = widen(self.score_spec(q), q, k, v)
        queries, keys = q.shape[1], k.shape[1]
        tiling = Tiling(
            queries, keys, min(QUERY_BLOCK_SIZE, queries), keys, lookback=None, lookahead=None
        )
        # The sparse functions are for self-attention of T tokens. Against a cache, a block of
        # queries scores all S keys: exact, and in memory linear in S.
        padded_mask = pad_mask(mask, tiling)

        def one(row: jax.Array, q: jax.Array) -> jax.Array:  # [B, R, N, H], twice
            here = tile_mask(padded_mask, tiling, row, 0)
            places = here.resolved_positions(q.shape[1], keys)
            chosen = pattern_mask(
                config.pattern, config.stride, config.num_summary_tokens, component, *places
            )
            return attend_reference(q, k, v, here.replace(allowed=chosen), scoring)[0]

        return map_query_blocks(one, (q,), block_size=QUERY_BLOCK_SIZE).astype(dtype)

    @nn.nowrap
    def score_spec(self, q: jax.Array) -> ScoreSpec:
        return ScoreSpec(1 / math.sqrt(q.shape[-1]), softmax_dtype=self.context.precision.softmax)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, N, T, T] booleans
        """Return the pattern of each head."""
        config, positions = self.config, inputs.positions
        parts = HEAD_GROUPS[config.factorization]
        each = [
            pattern_mask(
                config.pattern, config.stride, config.num_summary_tokens, part, positions, positions
            )
            for part in parts
        ]
        return jnp.repeat(jnp.stack(each, axis=1), config.num_heads // len(parts), axis=1)

"""Sparse Transformer: attention factorised into a local and a far pattern (Child et al. 2019)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import PartialAttention, ScoreSpec, attend_blockwise, merge_partials
from transformer.attend.reference import attend_reference
from transformer.attend.sparse.map_queries import QUERY_BLOCK_SIZE, map_query_blocks
from transformer.attend.tiles import Tiling, pad_mask, tile_mask
from transformer.cache import KVCache
from transformer.heads import QKV, project_output, project_qkv
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import reject_mask_patterns, reject_memory, reject_weights
from transformer.variants.configs import HEAD_GROUPS as HEAD_GROUPS
from transformer.variants.configs import SparseTransformerConfig as SparseTransformerConfig
from transformer.variants.keys_seen import sparse_transformer_visible_keys
from transformer.variants.sparse_patterns import (
    Factorization,
    far_attention,
    local_mask,
    pattern_mask,
)


class SparseTransformer(Mixer):
    """Softmax attention over the union of the parts, or each half of the heads over one."""

    config: SparseTransformerConfig

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
        config, dtype = self.config, self.context.precision.compute
        shape = (
            batch,
            length,
            config.resolved_num_kv_heads,
            config.resolved_head_dim(self.context.d_model),
        )
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a cache it picks from all keys kept: sparse in what is seen, not in what is done."""
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, mask)
        q, k, v = self.project(x, inputs)
        mask = mask.replace(positions=inputs.positions)
        if cache is not None:
            cache = cache.write(k, v, inputs.positions)
            k, v, mask = (
                cache.keys,
                cache.values,
                mask.with_keys(cache.positions, keys_include_queries=True),
            )
        look: Any = self.attend_uncached if cache is None else self.attend_cached
        groups = zip(*(self.split_head_groups(each) for each in (q, k, v)), strict=True)
        found = [
            look(part, *group, mask)
            for part, group in zip(HEAD_GROUPS[config.factorization], groups, strict=True)
        ]
        y = jnp.concatenate(found, axis=2)
        return MixerOutput(project_output(self, y, config, shared), cache, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions, self.config, self.context)

    @nn.nowrap
    def split_head_groups(self, heads: jax.Array) -> list[jax.Array]:  # [B, T, N, H]
        """One group of heads for each part."""
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
        """The parts, each by itself, as one softmax."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = self.score_spec(q).widen(q, k, v)
        parts: list[PartialAttention] = []
        if component in ("local", "merged"):
            nearby = local_mask(config.pattern, config.stride, mask, q.shape[1])
            tile = self.context.hardware.tile_size
            parts.append(attend_blockwise(q, k, v, nearby, scoring, block_size=tile))
        if component in ("far", "merged"):
            apart = component == "merged"
            for each in far_attention(
                config.pattern, config.stride, config.num_summary_tokens, mask, exclude_local=apart
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
        """Queries over all keys of a cache: densely, but a block of them after the other."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = self.score_spec(q).widen(q, k, v)
        queries, keys = q.shape[1], k.shape[1]
        tiling = Tiling(
            queries, keys, min(QUERY_BLOCK_SIZE, queries), keys, lookback=None, lookahead=None
        )
        given = pad_mask(mask, tiling)

        def one(row: jax.Array, q: jax.Array) -> jax.Array:  # [B, R, N, H], twice
            here = tile_mask(given, tiling, row, 0)
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
        """The pattern of each head."""
        config, positions = self.config, inputs.positions
        parts = HEAD_GROUPS[config.factorization]
        each = [
            pattern_mask(
                config.pattern, config.stride, config.num_summary_tokens, part, positions, positions
            )
            for part in parts
        ]
        return jnp.repeat(jnp.stack(each, axis=1), config.num_heads // len(parts), axis=1)


MIXERS[SparseTransformerConfig.kind] = SparseTransformer

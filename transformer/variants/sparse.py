"""Sparse Transformer: attention factorised into a local and a far pattern (Child et al. 2019)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import Looked, Scoring, attend_blockwise, merge
from transformer.attend.reference import attend_reference
from transformer.attend.sparse.map_queries import BLOCK, map_queries
from transformer.attend.tiles import Tiling, tile_mask, whole
from transformer.cache import KVCache
from transformer.heads import Heads, join, project
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.variants.configs import PARTS as PARTS
from transformer.variants.configs import SparseConfig as SparseConfig
from transformer.variants.keys_seen import in_sparse
from transformer.variants.sparse_patterns import Factor, far, local, sees


class Sparse(Mixer):
    """Softmax attention over the union of the parts, or each half of the heads over one."""

    config: SparseConfig

    @staticmethod
    def abilities(config: SparseConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: SparseConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: SparseConfig, width: int, length: int) -> ScoreFlops:
        return in_sparse(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        config, dtype = self.config, self.shared.precision.compute
        shape = (batch, length, config.key_heads, config.query_width(self.shared.width))
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a cache it picks from all keys kept: sparse in what is seen, not in what is done."""
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, mask)
        q, k, v = self.project(x, inputs)
        mask = mask.replace(positions=inputs.positions)
        if cache is not None:
            cache = cache.write(k, v, inputs.positions)
            k, v, mask = cache.keys, cache.values, mask.over(cache.positions, holds_queries=True)
        look: Any = self.attended if cache is None else self.decoded
        groups = zip(*(self.grouped(each) for each in (q, k, v)), strict=True)
        found = [
            look(part, *group, mask)
            for part, group in zip(PARTS[config.factor], groups, strict=True)
        ]
        y = jnp.concatenate(found, axis=2)
        return MixerOutput(join(self, y, config, shared), cache, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> Heads:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project(self, x, inputs.positions, self.config, self.shared)

    @nn.nowrap
    def grouped(self, heads: jax.Array) -> list[jax.Array]:  # [B, T, N, H]
        """One group of heads for each part."""
        return jnp.split(heads, len(PARTS[self.config.factor]), axis=2)

    @nn.nowrap
    def attended(
        self,
        part: Factor,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, T, K, H]
        v: jax.Array,  # [B, T, K, H]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """The parts, each by itself, as one softmax."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = self.scoring(q).widened(q, k, v)
        parts: list[Looked] = []
        if part in ("local", "merged"):
            nearby = local(config.pattern, config.stride, mask, q.shape[1])
            tile = self.shared.hardware.tile
            parts.append(attend_blockwise(q, k, v, nearby, scoring, block=tile))
        if part in ("far", "merged"):
            apart = part == "merged"
            for each in far(config.pattern, config.stride, config.summary, mask, apart=apart):
                parts.append(each(q, k, v, scoring))
        return merge(parts).y.astype(dtype)

    @nn.nowrap
    def decoded(
        self,
        part: Factor,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, S, K, H]
        v: jax.Array,  # [B, S, K, H]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """Queries over all keys of a cache: densely, but a block of them after the other."""
        config, dtype = self.config, v.dtype
        scoring, (q, k, v) = self.scoring(q).widened(q, k, v)
        queries, keys = q.shape[1], k.shape[1]
        tiling = Tiling(queries, keys, min(BLOCK, queries), keys, behind=None, ahead=None)
        given = whole(mask, tiling)

        def one(row: jax.Array, q: jax.Array) -> jax.Array:  # [B, R, N, H], twice
            here = tile_mask(given, tiling, row, 0)
            places = here.places(q.shape[1], keys)
            chosen = sees(config.pattern, config.stride, config.summary, part, *places)
            return attend_reference(q, k, v, here.replace(allowed=chosen), scoring)[0]

        return map_queries(one, (q,), block=BLOCK).astype(dtype)

    @nn.nowrap
    def scoring(self, q: jax.Array) -> Scoring:
        return Scoring(1 / math.sqrt(q.shape[-1]), softmax_dtype=self.shared.precision.softmax)

    @nn.nowrap
    def select(
        self,
        heads: Heads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, N, T, T] booleans
        """The pattern of each head."""
        config, positions = self.config, inputs.positions
        parts = PARTS[config.factor]
        each = [
            sees(config.pattern, config.stride, config.summary, part, positions, positions)
            for part in parts
        ]
        return jnp.repeat(jnp.stack(each, axis=1), config.heads // len(parts), axis=1)


MIXERS[SparseConfig.kind] = Sparse

"""Top-k attention: each query looks at the keys that score highest for it (Gupta et al. 2021)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import Scoring
from transformer.attend.sparse.top_k import attend_top_k, top, top_values, top_weights
from transformer.cache import KVCache, MemoryCache
from transformer.dropout import fold
from transformer.heads import Heads, join, key_heads, project, query_heads, value_heads
from transformer.masks import dense
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.variants.configs import TopKConfig as TopKConfig
from transformer.variants.keys_seen import in_groups


class TopK(Mixer):
    """Which keys a query sees goes by keys before it alone: the form is exactly causal."""

    config: TopKConfig

    @staticmethod
    def abilities(config: TopKConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: TopKConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: TopKConfig, width: int, length: int) -> ScoreFlops:
        """Scores of all keys, values of those chosen."""
        each = 2 * config.heads * config.query_width(width)
        averaged = round(each * in_groups(config.chosen, length).causal)
        return ScoreFlops(
            full=each * (length + min(config.chosen, length)),
            causal=each * (length + 1) // 2 + averaged,
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache(*self.empty(batch, length))

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache(*self.empty(batch, length))

    @nn.nowrap
    def empty(self, batch: int, length: int) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H] each
        width = self.config.query_width(self.shared.width)
        shape = (batch, length, self.config.key_heads, width)
        zeros = jnp.zeros(shape, self.shared.precision.compute)
        return zeros, zeros

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a `MemoryCache`, the memory is projected once: later calls do without it."""
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        if inputs.memory is not None or isinstance(cache, MemoryCache):
            (q, k, v), cache = self.of_memory(x, inputs.memory, cache)
        else:
            q, k, v = self.project(x, inputs)
            if cache is not None:
                cache = cache.write(k, v, inputs.positions)
                k, v = cache.keys, cache.values
                mask = mask.over(cache.positions, holds_queries=True)
        scoring = self.scoring(q.shape[-1], fold(inputs.dropout_rngs, 0))
        if "weights" in inputs.outputs:
            weights = top_weights(q, k, mask, scoring, config.chosen)
            y = top_values(weights, v, scoring)
            return MixerOutput(join(self, y, config, shared), cache, {"weights": weights})
        y = attend_top_k(q, k, v, mask, scoring, config.chosen)
        return MixerOutput(join(self, y, config, shared), cache, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> Heads:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project(self, x, inputs.positions, self.config, self.shared)

    def of_memory(
        self,
        x: jax.Array,  # [B, T, D]
        memory: jax.Array | None,  # [B, S, D]
        cache: Any,
    ) -> tuple[Heads, MemoryCache | None]:
        """Queries of x, keys and values of the memory or of what a cache has kept of it."""
        config, shared = self.config, self.shared
        if cache is not None and not isinstance(cache, MemoryCache):
            raise ValueError("mixer top_k: with a memory, give a cache of init_memory_cache")
        q = query_heads(self, x, config, shared)
        if memory is None:
            kept: Any = cache
            return Heads(q, kept.keys, kept.values), kept
        k = key_heads(self, memory, config, shared)
        v = value_heads(self, memory, config, shared)
        return Heads(q, k, v), None if cache is None else cache.write(k, v)

    @nn.nowrap
    def scoring(self, width: int, dropout_rngs: jax.Array | None = None) -> Scoring:
        config = self.config
        return Scoring(
            scale=1 / math.sqrt(width),
            softmax_dtype=self.shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=dropout_rngs,
        )

    @nn.nowrap
    def select(
        self,
        heads: Heads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """The keys chosen, of those that the mask shows."""
        q, k, _ = heads
        scores = self.scoring(q.shape[-1]).scores(q, k, inputs.positions, inputs.positions)
        shown = dense(inputs.mask, q.shape[1], q.shape[1])[:, None]
        return top(scores, shown, self.config.chosen)


MIXERS[TopKConfig.kind] = TopK

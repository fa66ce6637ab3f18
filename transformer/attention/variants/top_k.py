"""Top-k attention: each query attends to its highest-scoring keys (Gupta et al. 2021)."""

import math
from typing import Any

import jax
from flax import linen as nn

from transformer.attention.cache import KVCache, MemoryCache
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.projections import (
    QKV,
    combine_heads,
    project_keys,
    project_qkv,
    project_queries,
    project_values,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.top_k_keys import (
    apply_top_k_weights,
    attend_top_k,
    top_k_mask,
    top_k_weights,
)
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.attention.variants.sparse_configs import TopKConfig
from transformer.layers.basic import fold_in
from transformer.taps import HEAD_OUTPUTS


@register_mixer
class TopKAttention(Mixer):
    """Softmax over the k highest scores; exactly causal, since only visible keys compete."""

    config: TopKConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: TopKConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: TopKConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: TopKConfig, width: int, length: int) -> ScoreFlops:
        """Count the scores of all keys and the values of the selected keys."""
        each = 2 * config.num_heads * config.resolved_head_dim(width)
        averaged = round(each * grouped_visible_keys(config.keys_per_query, length).causal)
        return ScoreFlops(
            full=each * (length + min(config.keys_per_query, length)),
            causal=each * (length + 1) // 2 + averaged,
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache.empty(batch, length, *self.cache_shape())

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache.empty(batch, length, *self.cache_shape())

    @nn.nowrap
    def cache_shape(self) -> tuple[int, int, str]:
        """Return K, H and the storage dtype of a cache."""
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        return self.config.resolved_num_kv_heads, head_dim, self.context.precision.cache_dtype

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a `MemoryCache`, the memory is projected once and not needed by later calls."""
        config, mask, cache = self.config, inputs.mask, inputs.cache
        if inputs.memory is not None or isinstance(cache, MemoryCache):
            (q, k, v), cache = self.attend_memory_inputs(x, inputs.memory, cache)
        else:
            q, k, v = self.project(x, inputs)
            if cache is not None:
                cache = cache.append(k, v, inputs.positions)
                k, v, key_positions = cache.read(q.dtype)
                mask = mask.with_keys(key_positions, keys_include_queries=True)
        scoring = self.score_spec(q.shape[-1], fold_in(inputs.dropout_rngs, 0))
        if "weights" in inputs.outputs:
            weights = top_k_weights(q, k, mask, scoring, config.keys_per_query)
            y = apply_top_k_weights(weights, v, scoring)
            return combine_heads(self, y, inputs, cache, {"weights": weights})
        y = attend_top_k(q, k, v, mask, scoring, config.keys_per_query)
        return combine_heads(self, y, inputs, cache)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(
            self, x, inputs.positions, self.config, self.context, position=self.config.position
        )

    def attend_memory_inputs(
        self,
        x: jax.Array,  # [B, T, D]
        memory: jax.Array | None,  # [B, S, D]
        cache: Any,
    ) -> tuple[QKV, MemoryCache | None]:
        """Return queries of x, and keys and values of the memory or of its cache."""
        config, context = self.config, self.context
        if cache is not None and not isinstance(cache, MemoryCache):
            raise ValueError("mixer top_k: with a memory, give a cache of init_memory_cache")
        q = project_queries(self, x, config, context)
        if memory is None:
            memory_cache: Any = cache
            k, v, _ = memory_cache.read(q.dtype)
            return QKV(q, k, v), memory_cache
        k = project_keys(self, memory, config, context)
        v = project_values(self, memory, config, context)
        return QKV(q, k, v), None if cache is None else cache.append(k, v)

    @nn.nowrap
    def score_spec(self, head_dim: int, dropout_rngs: jax.Array | None = None) -> ScoreSpec:
        config = self.config
        return ScoreSpec(
            scale=1 / math.sqrt(head_dim),
            softmax_dtype=self.context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=dropout_rngs,
        )

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """Return the selected keys among those that the mask shows."""
        q, k, _ = heads
        scores = self.score_spec(q.shape[-1]).compute_scores(
            q, k, inputs.positions, inputs.positions
        )
        visible = dense_mask(inputs.mask, q.shape[1], q.shape[1])[:, None]
        return top_k_mask(scores, visible, self.config.keys_per_query)

"""Full softmax attention: multi-head, grouped-query, multi-query and cross attention.

    q, k, v = W_q x, W_k x, W_v x     per head; keys and values come from the memory if there is one
    y = W_o concat over heads of softmax(score(q, k) under the mask) v

The weights are in `projections.py`, RoPE in `rope.py`, the softmax in `attend.py`.
"""

import math
from typing import Any

import jax
from flax import linen as nn

from transformer.attention import scores
from transformer.attention.attend import ScoreSpec, attend, dot_product_scores
from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.cache import KVCache, MemoryCache
from transformer.attention.config import (
    AdditiveScore,
    AttentionConfig,
    BilinearScore,
    ScaledDotScore,
)
from transformer.attention.position_bias import PositionTerms, position_terms
from transformer.attention.position_config import NoPosition, RelativePositions, RoPE
from transformer.attention.projections import (
    project_keys,
    project_output,
    project_queries,
    project_values,
)
from transformer.attention.rope import apply_rope
from transformer.attention.sinks import declare_sink_logits
from transformer.layers.basic import fold_in
from transformer.registry import MIXERS


class Attention(Mixer):
    """Mixer `full`: softmax attention over all keys that the mask shows."""

    config: AttentionConfig

    @staticmethod
    def abilities(config: AttentionConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: AttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: AttentionConfig, width: int, length: int) -> ScoreFlops:
        """Count an additive score as one product of its hidden layer and a vector per key."""
        head_dims = config.score_head_dim(width) + (
            config.value_head_dim or config.resolved_head_dim(width)
        )
        per_key, per_query = config.num_heads * head_dims, 0  # multiplications
        if isinstance(config.position, RelativePositions):
            num_distances = config.position.num_distances
            per_key += config.num_heads * 2 * num_distances
            per_query = config.num_heads * head_dims * num_distances
        full, causal = 2 * (per_key * length + per_query), per_key * (length + 1) + 2 * per_query
        return ScoreFlops(full=full, causal=causal)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache.empty(batch, length, *self.cache_sizes())

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache.empty(batch, length, *self.cache_sizes())

    @nn.nowrap
    def cache_sizes(self) -> tuple[int, int, Any, int]:
        """Return K, H of cached keys, the storage dtype, and H of values."""
        config, d_model = self.config, self.context.d_model
        value_head_dim = config.value_head_dim or config.resolved_head_dim(d_model)
        dtype = self.context.precision.cache_dtype
        return config.resolved_num_kv_heads, config.score_head_dim(d_model), dtype, value_head_dim

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, mask, cache = self.config, inputs.mask, inputs.cache
        q, terms = self.queries(x), PositionTerms()
        if inputs.memory is not None or isinstance(cache, MemoryCache):
            k, v, cache = self.memory_keys_and_values(inputs.memory, cache, q.dtype)
        else:
            k, v = self.keys_and_values(x)
            if isinstance(config.position, RoPE):
                q, k = (apply_rope(each, inputs.positions, config.position) for each in (q, k))
            if cache is not None:
                cache = cache.append(k, v, inputs.positions)
                k, v, key_positions = cache.read(q.dtype)
                mask = mask.with_keys(key_positions, keys_include_queries=True)
            if not isinstance(config.position, NoPosition | RoPE):
                terms = self.position_terms()
            if not config.dot_product_only and mask.positions is None:
                mask = mask.replace(positions=inputs.positions)
        dropout_rngs = inputs.dropout_rngs if config.dropout else None
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]) if isinstance(config.score, ScaledDotScore) else 1.0,
            score_fn=self.score_fn(q.shape[-1]),
            bias=terms.bias,
            relative_tables=terms.relative_tables,
            soft_cap=config.soft_cap,
            softmax_dtype=self.context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=None if dropout_rngs is None else fold_in(dropout_rngs, 0),
        )
        attended = attend(
            q,
            k,
            v,
            mask,
            score_spec,
            sink_logits=self.sink_logits(),
            backend=config.backend,
            hardware=self.context.hardware,
            constrain=self.context.constrain,
            outputs=inputs.outputs,
        )
        y = project_output(self, attended.y, config, self.context)
        return MixerOutput(y, cache, attended.aux)

    # Linen derives a weight's initial value from the number of weights declared before it, so the
    # order of the calls above is part of the parameter layout.

    def queries(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, N, H]
        """Project queries and apply the score's query map, without RoPE."""
        q = project_queries(self, x, self.config, self.context)
        if isinstance(self.config.score, BilinearScore | AdditiveScore):
            q = scores.transform_queries(self, q, self.config.score, self.context)
        return q

    def keys_and_values(
        self,
        x: jax.Array,  # [B, S, D]
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, H of values]
        """Project keys and values and apply the score's key map, without RoPE."""
        config, context = self.config, self.context
        k = project_keys(self, x, config, context)
        if isinstance(config.score, AdditiveScore):
            k = scores.transform_keys(self, k, config.score, context)
        return k, project_values(self, x, config, context, config.value_head_dim)

    def memory_keys_and_values(
        self,
        memory: jax.Array | None,  # [B, S, D]
        cache: Any,
        dtype: Any,
    ) -> tuple[jax.Array, jax.Array, MemoryCache | None]:
        """Return keys and values of the memory, from the cache if `memory` is None."""
        if not isinstance(cache, MemoryCache | None):
            raise ValueError("attention with a memory: give a cache of init_memory_cache")
        if memory is not None:
            k, v = self.keys_and_values(memory)
            if cache is None:
                return k, v, None
            cache = cache.append(k, v)
        assert cache is not None
        return *cache.read(dtype)[:2], cache

    def position_terms(self) -> PositionTerms:
        """Declare the position's tables; return what they add to scores and values."""
        config = self.config
        head_dim = config.resolved_head_dim(self.context.d_model)
        return position_terms(
            self,
            config.position,
            self.context,
            num_heads=config.num_heads,
            key_head_dim=head_dim,
            value_head_dim=config.value_head_dim or head_dim,
        )

    def score_fn(self, head_dim: int) -> Any:
        """Return the score function, and declare its weights if it has any."""
        config = self.config
        if not isinstance(config.score, AdditiveScore):
            return dot_product_scores
        return scores.make_additive_score_fn(self, config.num_heads, head_dim, self.context)

    def sink_logits(self) -> jax.Array | None:  # [N]
        """Declare the sinks, if the configuration has any."""
        if not self.config.sinks:
            return None
        return declare_sink_logits(self, self.config.num_heads, self.context)


MIXERS[AttentionConfig.kind] = Attention

"""Full softmax attention: multi-head, grouped-query, multi-query and cross, in one mixer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention import scores
from transformer.attention.attend import attend
from transformer.attention.backends.merge import declare_sink_logits
from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.cache import KVCache, MemoryCache
from transformer.attention.config import AttentionConfig
from transformer.attention.position_bias import PositionTerms, position_terms
from transformer.attention.position_config import RelativePositions, RoPE
from transformer.attention.projections import (
    project_keys,
    project_output,
    project_queries,
    project_values,
)
from transformer.attention.rope import apply_rope
from transformer.attention.score_spec import ScoreSpec
from transformer.layers.dropout import fold_in
from transformer.registry import MIXERS


class Attention(Mixer):
    """y = concat over heads of softmax(q k^T / sqrt(H)) v, times the output matrix."""

    config: AttentionConfig

    @staticmethod
    def abilities(config: AttentionConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: AttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: AttentionConfig, width: int, length: int) -> ScoreFlops:
        """An additive score is one product too: of its hidden layer and a vector, for each key."""
        both = config.score_head_dim(width) + (
            config.value_head_dim or config.resolved_head_dim(width)
        )
        each, once = config.num_heads * both, 0  # multiplications with one key, and with none
        if isinstance(config.position, RelativePositions):
            each += config.num_heads * 2 * config.position.num_distances
            once = config.num_heads * both * config.position.num_distances
        return ScoreFlops(full=2 * (each * length + once), causal=each * (length + 1) + 2 * once)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache(*self.empty_keys_and_values(batch, length))

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache(*self.empty_keys_and_values(batch, length))

    @nn.nowrap
    def empty_keys_and_values(self, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
        """Room for keys [B, S, K, H where they meet queries] and values [B, S, K, H of values]."""
        config, dtype = self.config, self.context.precision.compute
        kv, _, v_width = self.head_sizes()
        k_width = config.score_head_dim(self.context.d_model)
        zeros = lambda width: jnp.zeros((batch, length, kv, width), dtype)  # noqa: E731
        return zeros(k_width), zeros(v_width)

    @nn.nowrap
    def head_sizes(self) -> tuple[int, int, int]:
        """K, H of queries and keys, H of values."""
        q_width = self.config.resolved_head_dim(self.context.d_model)
        return (
            self.config.resolved_num_kv_heads,
            q_width,
            self.config.value_head_dim or q_width,
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a `MemoryCache`, the memory is projected once: later calls do without it."""
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.context
        q, related = self.queries(x), PositionTerms()
        if isinstance(cache, MemoryCache):
            cache = (
                cache if inputs.memory is None else cache.fill(*self.keys_and_values(inputs.memory))
            )
            k, v = cache.keys, cache.values
        elif inputs.memory is not None:
            if cache is not None:
                raise ValueError("attention with a memory: give a cache of init_memory_cache")
            k, v = self.keys_and_values(inputs.memory)
        else:
            k, v = self.keys_and_values(x)
            q, k = (
                self.maybe_apply_rope(q, inputs.positions),
                self.maybe_apply_rope(k, inputs.positions),
            )
            if cache is not None:
                cache = cache.append(k, v, inputs.positions)
                k, v = cache.keys, cache.values
                mask = mask.with_keys(cache.positions, keys_include_queries=True)
            related = self.make_position_terms()
            if not config.dot_product_only and mask.positions is None:
                mask = mask.replace(positions=inputs.positions)
        scoring = ScoreSpec(
            scale=scores.score_scale(config.score, q.shape[-1]),
            score_fn=scores.make_score_fn(
                self, config.score, config.num_heads, q.shape[-1], shared
            ),
            bias=related.bias,
            relative_tables=related.relative_tables,
            soft_cap=config.soft_cap,
            softmax_dtype=shared.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        sinks = declare_sink_logits(self, config.num_heads, shared) if config.sinks else None
        how: Any = dict(
            backend=config.backend, hardware=shared.hardware, constrain=shared.constrain
        )
        attended = attend(q, k, v, mask, scoring, sink_logits=sinks, outputs=inputs.outputs, **how)
        y = project_output(self, attended.y, config, shared)
        return MixerOutput(y, cache, attended.aux)

    def queries(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, N, H]
        """As they meet the keys, but not turned yet."""
        q = project_queries(self, x, self.config, self.context)
        return scores.transform_queries(self, q, self.config.score, self.context)

    def keys_and_values(
        self,
        source: jax.Array,  # [B, S, D]
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, H of values]
        """Keys as they meet the queries, but not turned yet."""
        config, shared = self.config, self.context
        k = project_keys(self, source, config, shared)
        k = scores.transform_keys(self, k, config.score, shared)
        return k, project_values(self, source, config, shared, config.value_head_dim)

    def maybe_apply_rope(
        self,
        x: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]
    ) -> jax.Array:  # [B, T, N, H]
        position = self.config.position
        return apply_rope(x, positions, position) if isinstance(position, RoPE) else x

    def make_position_terms(self) -> PositionTerms:
        """What the positions add to scores and values."""
        config, (_, q_width, v_width) = self.config, self.head_sizes()
        widths = dict(num_heads=config.num_heads, key_head_dim=q_width, value_head_dim=v_width)
        return position_terms(self, config.position, self.context, **widths)


MIXERS[AttentionConfig.kind] = Attention

"""Full softmax attention: multi-head, grouped-query, multi-query and cross, in one mixer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer import scores
from transformer.attend import Scoring, attend
from transformer.attention_config import AttentionConfig
from transformer.cache import KVCache, MemoryCache
from transformer.dropout import fold
from transformer.heads import join, key_heads, query_heads, value_heads
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import RelativePositions, Rotary, rotate
from transformer.relations import Relation, relation
from transformer.sinks import sink_scores

__all__ = ["Attention", "AttentionConfig"]


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
        both = config.meeting_width(width) + (config.value_width or config.query_width(width))
        each, once = config.heads * both, 0  # multiplications with one key, and with none
        if isinstance(config.position, RelativePositions):
            each += config.heads * 2 * config.position.distances
            once = config.heads * both * config.position.distances
        return ScoreFlops(full=2 * (each * length + once), causal=each * (length + 1) + 2 * once)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache(*self.empty(batch, length))

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache(*self.empty(batch, length))

    @nn.nowrap
    def empty(self, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
        """Room for keys [B, S, K, H where they meet queries] and values [B, S, K, H of values]."""
        config, dtype = self.config, self.shared.precision.compute
        kv, _, v_width = self.sizes()
        k_width = config.meeting_width(self.shared.width)
        zeros = lambda width: jnp.zeros((batch, length, kv, width), dtype)  # noqa: E731
        return zeros(k_width), zeros(v_width)

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int]:
        """K, H of queries and keys, H of values."""
        q_width = self.config.query_width(self.shared.width)
        return (
            self.config.key_heads,
            q_width,
            self.config.value_width or q_width,
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        """With a `MemoryCache`, the memory is projected once: later calls do without it."""
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        q, related = self.queries(x), Relation()
        if isinstance(cache, MemoryCache):
            cache = (
                cache
                if inputs.memory is None
                else cache.write(*self.keys_and_values(inputs.memory))
            )
            k, v = cache.keys, cache.values
        elif inputs.memory is not None:
            if cache is not None:
                raise ValueError("attention with a memory: give a cache of init_memory_cache")
            k, v = self.keys_and_values(inputs.memory)
        else:
            k, v = self.keys_and_values(x)
            q, k = self.turned(q, inputs.positions), self.turned(k, inputs.positions)
            if cache is not None:
                cache = cache.write(k, v, inputs.positions)
                k, v = cache.keys, cache.values
                mask = mask.over(cache.positions, holds_queries=True)
            related = self.related()
            if not config.products and mask.positions is None:
                mask = mask.replace(positions=inputs.positions)
        scoring = Scoring(
            scale=scores.scale(config.score, q.shape[-1]),
            meet=scores.meet(self, config.score, config.heads, q.shape[-1], shared),
            bias=related.bias,
            relative=related.relative,
            soft_cap=config.soft_cap,
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=fold(inputs.dropout_rngs, 0),
        )
        sinks = sink_scores(self, config.heads, shared) if config.sinks else None
        how: Any = dict(form=config.form, hardware=shared.hardware, constrain=shared.constrain)
        attended = attend(q, k, v, mask, scoring, sinks=sinks, outputs=inputs.outputs, **how)
        y = join(self, attended.y, config, shared)
        return MixerOutput(y, cache, attended.aux)

    def queries(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, N, H]
        """As they meet the keys, but not turned yet."""
        q = query_heads(self, x, self.config, self.shared)
        return scores.map_queries(self, q, self.config.score, self.shared)

    def keys_and_values(
        self,
        source: jax.Array,  # [B, S, D]
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, H of values]
        """Keys as they meet the queries, but not turned yet."""
        config, shared = self.config, self.shared
        k = key_heads(self, source, config, shared)
        k = scores.map_keys(self, k, config.score, shared)
        return k, value_heads(self, source, config, shared, config.value_width)

    def turned(
        self,
        x: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]
    ) -> jax.Array:  # [B, T, N, H]
        position = self.config.position
        return rotate(x, positions, position) if isinstance(position, Rotary) else x

    def related(self) -> Relation:
        """What the positions add to scores and values."""
        config, (_, q_width, v_width) = self.config, self.sizes()
        widths = dict(heads=config.heads, key_width=q_width, value_width=v_width)
        return relation(self, config.position, self.shared, **widths)


MIXERS[AttentionConfig.kind] = Attention

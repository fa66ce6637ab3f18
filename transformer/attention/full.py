"""Full softmax attention: multi-head, grouped-query, multi-query and cross attention.

    q, k, v = W_q x, W_k x, W_v x     per head; keys and values come from the memory if there is one
    y = W_o concat over heads of softmax(score(q, k) under the mask) v

Projections and RoPE are in `projections.py`, the softmax in `attend.py`. What few models have is
in `scores.py`: scores with weights, terms of positions, and sinks.
"""

from typing import Any

import jax
from flax import linen as nn

from transformer.attention.attend import ScoreSpec, attend
from transformer.attention.attention_config import AttentionConfig
from transformer.attention.cache import KVCache, MemoryCache, project_memory
from transformer.attention.mixer import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.projections import project_output, project_qkv, project_queries
from transformer.attention.scores import add_score_terms, count_score_flops, declare_sink_logits
from transformer.inspection import ATTENTION_VALUES
from transformer.layers.basic import fold_in
from transformer.mixer_registry import MIXERS


class Attention(Mixer):
    """Mixer `full`: softmax attention over all keys that the mask shows."""

    config: AttentionConfig
    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: AttentionConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: AttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: AttentionConfig, width: int, length: int) -> ScoreFlops:
        return count_score_flops(config, width, length)

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

    # Linen derives a weight's initial value from the number of weights declared before it, so the
    # order of the declarations below is part of the parameter layout: projections of q, k and v,
    # terms of the scores, sinks, output.

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        mask, cache = inputs.mask, inputs.cache

        is_cross = inputs.memory is not None or isinstance(cache, MemoryCache)
        if is_cross:
            # No RoPE: the positions of x and of the memory are those of two sequences.
            q = project_queries(self, x, config, context)
            k, v, cache = project_memory(self, inputs.memory, cache, config, context, q.dtype)
        else:
            q, k, v = project_qkv(self, x, inputs.positions, config, context)
            if cache is not None:
                # Keys are cached after RoPE: each is rotated once, by its own position.
                cache = cache.append(k, v, inputs.positions)
                k, v, key_positions = cache.read(q.dtype)
                mask = mask.with_keys(key_positions, keys_include_queries=True)

        score, dropout_rngs = config.score, inputs.dropout_rngs if config.dropout else None
        score_spec = ScoreSpec(
            # A dot product of H independent terms of variance 1 has variance H (section 3.2.1).
            scale=(getattr(score, "divisor", 1.0) or q.shape[-1]) ** -0.5,  # without: 1
            soft_cap=config.soft_cap,
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=None if dropout_rngs is None else fold_in(dropout_rngs, 0),
        )
        if not config.dot_product_only:
            # Positions are those of one sequence: between a memory and x, a distance means nothing.
            own = None if is_cross else inputs
            score_spec = add_score_terms(self, score_spec, config, context, q.shape[-1], own)
            # A mask may leave positions out (they count from 0); their terms need the real ones.
            if not is_cross and mask.positions is None:
                mask = mask.replace(positions=inputs.positions)
        sink_logits = declare_sink_logits(self, config.num_heads, context) if config.sinks else None

        options: Any = dict(backend=config.backend, outputs=inputs.outputs, sink_logits=sink_logits)
        options |= dict(hardware=context.hardware, constrain=context.constrain, taps=inputs.taps)
        attended = attend(q, k, v, mask, score_spec, **options)
        return MixerOutput(project_output(self, attended.y, config, context), cache, attended.aux)


MIXERS[AttentionConfig.kind] = Attention

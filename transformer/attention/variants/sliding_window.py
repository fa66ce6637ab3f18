"""Sliding-window attention, optionally dilated (Beltagy et al. 2020, section 3.1)."""

import dataclasses
from typing import Any

import jax
from flax import linen as nn

from transformer.attention.attend import attend
from transformer.attention.cache import RollingCache, mark_padding, prepend_cached_keys
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_memory,
)
from transformer.attention.projections import QKV, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec
from transformer.attention.scores import declare_sink_logits
from transformer.attention.sparse_ops.visible_key_counts import sliding_window_visible_keys
from transformer.attention.variants.sparse_configs import SlidingWindowConfig
from transformer.layers.basic import fold_in
from transformer.taps import ATTENTION_VALUES, reject_requests


@register_mixer
class SlidingWindowAttention(Mixer):
    """Softmax attention restricted to a window of positions."""

    config: SlidingWindowConfig

    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: SlidingWindowConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def constants(config: SlidingWindowConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: SlidingWindowConfig, width: int, length: int) -> ScoreFlops:
        return sliding_window_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> RollingCache:
        """Return a cache for the receptive field; its size does not grow with `length`."""
        config, size = self.config, min(self.config.receptive_field, length)
        width = config.resolved_head_dim(self.context.d_model)
        return RollingCache.empty(
            batch, size, config.resolved_num_kv_heads, width, self.context.precision.cache_dtype
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        mask = mask.replace(pattern=self.add_window(mask.pattern))
        q, k, v = self.project(x, inputs)
        before = 0  # queries that stand in for tokens of the ring, and are of no interest
        if cache is not None:
            if not mask.pattern.causal:
                raise ValueError(
                    "mixer sliding_window: decoding with a cache needs a causal mask; give one"
                )
            if mask.pattern.prefix or mask.global_positions is not None:
                raise ValueError(
                    "mixer sliding_window: its cache holds one window of tokens, and a prefix or "
                    "global tokens are seen from farther; decode without a cache"
                )
            here = mark_padding(inputs.positions, x.shape[0])
            ring, cache = cache, cache.append(k, v, here)
            q, k, v, mask, _, before = prepend_cached_keys(ring, q, k, v, mask, here)
            k, v = k.astype(q.dtype), v.astype(q.dtype)  # from the storage dtype of the cache
        scoring = ScoreSpec(
            scale=(config.score.divisor or q.shape[-1]) ** -0.5,
            soft_cap=config.soft_cap,
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        sinks = declare_sink_logits(self, config.num_heads, context) if config.sinks else None
        options: Any = dict(
            backend=config.backend, hardware=context.hardware, constrain=context.constrain
        )
        options |= dict(outputs=inputs.outputs, taps=inputs.taps)
        if before and inputs.taps is not None:
            # The rows of tokens of the ring would be among the values.
            reject_requests(config.kind, inputs.taps, "with a cache")
            options["taps"] = None
        attended = attend(q, k, v, mask, scoring, sink_logits=sinks, **options)
        y, aux = attended.y[:, before:], dict(attended.aux)
        if "weights" in aux:
            aux["weights"] = aux["weights"][:, :, before:]
        if not before:
            inputs = inputs.replace(taps=None)  # `attend` has shown the heads
        return combine_heads(self, y, inputs, cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(
            self, x, inputs.positions, self.config, self.context, position=self.config.position
        )

    @nn.nowrap
    def add_window(self, pattern: MaskPattern) -> MaskPattern:
        """Return the mask's pattern with the window added."""
        if pattern.window:
            raise ValueError(
                "mixer sliding_window: has a window of its own; give a mask without a window"
            )
        config = self.config
        return dataclasses.replace(pattern, window=config.window, dilation=config.dilation)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, 1, T, T] booleans
        """Return the window as booleans."""
        window = Mask(self.add_window(MaskPattern()), positions=inputs.positions)
        length = heads.q.shape[1]
        return dense_mask(window, length, length)[:, None]

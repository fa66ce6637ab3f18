"""Attention within a window that slides along the tokens, dilated or not (Beltagy et al. 2020)."""

import dataclasses
import math
from typing import Any

import jax
from flax import linen as nn

from transformer.attend import Scoring, attend
from transformer.dropout import fold
from transformer.heads import Heads, join, project
from transformer.masks import Mask, Pattern, dense
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import refuse_memory
from transformer.ring_cache import RingCache, look_back, placed
from transformer.sinks import sink_scores
from transformer.variants.configs import SlidingWindowConfig as SlidingWindowConfig
from transformer.variants.keys_seen import in_window


class SlidingWindow(Mixer):
    """Softmax attention under the mask and the window."""

    config: SlidingWindowConfig

    @staticmethod
    def abilities(config: SlidingWindowConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def constants(config: SlidingWindowConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: SlidingWindowConfig, width: int, length: int) -> ScoreFlops:
        return in_window(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> RingCache:
        """Of as many tokens as the window reaches, however many will come."""
        config, size = self.config, min(self.config.reach, length)
        width = config.query_width(self.shared.width)
        return RingCache.empty(batch, size, config.key_heads, width, self.shared.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        mask = mask.replace(pattern=self.windowed(mask.pattern))
        q, k, v = self.project(x, inputs)
        before = 0  # queries that stand in for tokens of the ring, and are of no interest
        if cache is not None:
            if not mask.pattern.causal:
                raise ValueError("mixer sliding_window: decodes under a causal mask; give one")
            here = placed(inputs.positions, len(x))
            ring, cache = cache, cache.write(k, v, here)
            q, k, v, mask, _, before = look_back(ring, q, k, v, mask, here)
        scoring = Scoring(
            scale=1 / math.sqrt(q.shape[-1]),
            soft_cap=config.soft_cap,
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=fold(inputs.dropout_rngs, 0),
        )
        sinks = sink_scores(self, config.heads, shared) if config.sinks else None
        how: Any = dict(form=config.form, hardware=shared.hardware, constrain=shared.constrain)
        attended = attend(q, k, v, mask, scoring, sinks=sinks, outputs=inputs.outputs, **how)
        y = attended.y[:, before:]
        aux = {name: each[:, :, before:] for name, each in attended.aux.items()}  # weights
        return MixerOutput(join(self, y, config, shared), cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> Heads:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project(self, x, inputs.positions, self.config, self.shared)

    @nn.nowrap
    def windowed(self, pattern: Pattern) -> Pattern:
        """The mask's pattern, with the window."""
        if pattern.window:
            raise ValueError("mixer sliding_window: has a window of its own; give a mask without")
        config = self.config
        return dataclasses.replace(pattern, window=config.window, dilation=config.dilation)

    @nn.nowrap
    def select(
        self,
        heads: Heads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, 1, T, T] booleans
        """The window."""
        window = Mask(self.windowed(Pattern()), positions=inputs.positions)
        length = heads.q.shape[1]
        return dense(window, length, length)[:, None]


MIXERS[SlidingWindowConfig.kind] = SlidingWindow

"""Performer: softmax attention estimated by random features (Choromanski et al. 2021)."""

from typing import Any

import jax
import numpy as np
from flax import linen as nn

from transformer.heads import join
from transformer.masks import Mask
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerOutput, Want
from transformer.variants.configs import PerformerConfig as PerformerConfig
from transformer.variants.features import draw_directions, random_features
from transformer.variants.kernel_attention import MemorySums, attend_by_kernel
from transformer.variants.prefix_sums import Sums


class Performer(Mixer):
    """y = phi(q) (sum of phi(k) v) / phi(q) (sum of phi(k)), in one pass from left to right."""

    config: PerformerConfig

    @staticmethod
    def abilities(config: PerformerConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(
        config: PerformerConfig, layer: int, width: int
    ) -> np.ndarray[Any, Any]:  # [M, H], or [M / 2, H] of trigonometric features
        """Random vectors: a function of (seed, layer, redraw)."""
        return draw_directions(
            config.directions,
            config.query_width(width),
            orthogonal=config.orthogonal,
            seed=(config.seed, layer, config.redraw),
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Sums:
        config = self.config
        head = config.query_width(self.shared.width)
        return Sums.zeros(batch, config.key_heads, config.features, head)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemorySums:
        return MemorySums(self.init_cache(batch, length))

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        memory: jax.Array | None = None,  # [B, S, D]
        cache: Sums | MemorySums | None = None,
        keys: jax.Array | None = None,
        constants: Any = None,  # array [M or M / 2, H]; None: those of layer 0
        want: Want = NOTHING,
    ) -> MixerOutput:
        config, shared = self.config, self.shared
        if constants is None:  # called by itself: a stack gives each layer its own
            constants = self.constants(config, 0, shared.width)
        feature_map = random_features(config.feature_map, constants)
        given: Any = dict(positions=positions, mask=mask, memory=memory, cache=cache, want=want)
        y, cache = attend_by_kernel(self, x, feature_map, **given)
        return MixerOutput(join(self, y, config, shared), cache, {})


MIXERS[PerformerConfig.kind] = Performer

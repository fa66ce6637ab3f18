"""Performer: softmax attention estimated by random features (Choromanski et al. 2021)."""

from typing import Any

import jax
import numpy as np
from flax import linen as nn

from transformer.heads import join
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.variants.configs import PerformerConfig as PerformerConfig
from transformer.variants.features import draw_directions, random_features
from transformer.variants.kernel_attention import MemorySums, attend_by_kernel, kernel_score_flops
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

    @staticmethod
    def score_flops(config: PerformerConfig, width: int, length: int) -> ScoreFlops:
        return kernel_score_flops(config, width, config.features, config.directions)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Sums:
        config = self.config
        head = config.query_width(self.shared.width)
        return Sums.zeros(batch, config.key_heads, config.features, head)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemorySums:
        return MemorySums(self.init_cache(batch, length))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        constants = inputs.constants
        config, shared = self.config, self.shared
        if constants is None:  # called by itself: a stack gives each layer its own
            constants = self.constants(config, 0, shared.width)
        feature_map = random_features(config.feature_map, constants)
        y, cache = attend_by_kernel(self, x, feature_map, inputs)
        return MixerOutput(join(self, y, config, shared), cache, {})


MIXERS[PerformerConfig.kind] = Performer

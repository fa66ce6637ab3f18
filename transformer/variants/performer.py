"""Performer: softmax attention estimated by random features (Choromanski et al. 2021)."""

from typing import Any

import jax
import numpy as np
from flax import linen as nn

from transformer.heads import project_output
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.variants.configs import PerformerConfig as PerformerConfig
from transformer.variants.features import draw_random_vectors, make_feature_map
from transformer.variants.kernel_attention import (
    MemoryKernelState,
    attend_with_kernel,
    kernel_score_flops,
)
from transformer.variants.prefix_sums import KernelState


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
        return draw_random_vectors(
            config.num_random_vectors,
            config.resolved_head_dim(width),
            orthogonal=config.orthogonal,
            seed=(config.seed, layer, config.redraw_index),
        )

    @staticmethod
    def score_flops(config: PerformerConfig, width: int, length: int) -> ScoreFlops:
        return kernel_score_flops(config, width, config.num_features, config.num_random_vectors)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KernelState:
        config = self.config
        head = config.resolved_head_dim(self.context.d_model)
        return KernelState.zeros(batch, config.resolved_num_kv_heads, config.num_features, head)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryKernelState:
        return MemoryKernelState(self.init_cache(batch, length))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        constants = inputs.constants
        config, shared = self.config, self.context
        if constants is None:  # called by itself: a stack gives each layer its own
            constants = self.constants(config, 0, shared.d_model)
        feature_map = make_feature_map(config.feature_map, constants)
        y, cache = attend_with_kernel(self, x, feature_map, inputs)
        return MixerOutput(project_output(self, y, config, shared), cache, {})


MIXERS[PerformerConfig.kind] = Performer

"""Linear attention: weights are products of elu + 1 (Katharopoulos et al. 2020)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.attention.projections import project_output
from transformer.attention.variants.kernel_attention import (
    MemoryKernelState,
    attend_with_kernel,
    kernel_score_flops,
)
from transformer.attention.variants.kernel_configs import LinearAttentionConfig
from transformer.attention.variants.prefix_sums import Features, KernelState
from transformer.registry import MIXERS

FEATURE_FLOOR = 1e-18
"""Of a feature: so weights of tokens whose entries are all far below zero are not 0 / 0."""


def elu_features(x: jax.Array) -> Features:  # [..., H] -> [..., H]
    """elu(x) + 1 (equation 7): x + 1 above zero, exp(x) below, with a slope of 1 where they meet.

    There a maximum or minimum of x and zero would share its slope between the two, half to each.
    """
    below = jnp.exp(jnp.where(x > 0, 0, x))
    return Features(jnp.maximum(jnp.where(x > 0, x + 1, below), FEATURE_FLOOR))


class LinearAttention(Mixer):
    """y = phi(q) (sum of phi(k) v) / phi(q) (sum of phi(k)), with H features for each head."""

    config: LinearAttentionConfig

    @staticmethod
    def abilities(config: LinearAttentionConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(config: LinearAttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LinearAttentionConfig, width: int, length: int) -> ScoreFlops:
        return kernel_score_flops(config, width, config.resolved_head_dim(width), directions=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KernelState:
        head = self.config.resolved_head_dim(self.context.d_model)
        return KernelState.zeros(batch, self.config.resolved_num_kv_heads, head, head)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryKernelState:
        return MemoryKernelState(self.init_cache(batch, length))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        y, cache = attend_with_kernel(self, x, elu_features, inputs)
        return MixerOutput(project_output(self, y, self.config, self.context), cache, {})


MIXERS[LinearAttentionConfig.kind] = LinearAttention

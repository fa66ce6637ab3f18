"""Linear attention with the feature map elu + 1 (Katharopoulos et al. 2020)."""

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
"""Lower bound of a feature: avoids 0 / 0 for tokens whose entries are all far below zero."""


def elu_features(x: jax.Array) -> Features:  # [..., H] -> [..., H]
    """Compute elu(x) + 1 (equation 7): x + 1 for x > 0, exp(x) otherwise. The slope at 0 is 1.

    `where` is used because a maximum or minimum of x and 0 would split its gradient at 0.
    """
    below = jnp.exp(jnp.where(x > 0, 0, x))
    return Features(jnp.maximum(jnp.where(x > 0, x + 1, below), FEATURE_FLOOR))


class LinearAttention(Mixer):
    """Kernel attention, H features per head: y = phi(q) (sum phi(k) v) / phi(q) (sum phi(k))."""

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

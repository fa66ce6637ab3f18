"""Linear attention with the feature map elu + 1 (Katharopoulos et al. 2020)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.projections import MultiHeadConfig, combine_heads
from transformer.attention.variants.feature_map_attention import (
    Features,
    LinearAttentionMemory,
    LinearAttentionState,
    attend_with_feature_map,
    feature_map_flops,
)
from transformer.taps import HEAD_OUTPUTS

FEATURE_FLOOR = 1e-18
"""Lower bound of a feature: avoids 0 / 0 for tokens whose entries are all far below zero."""


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(MultiHeadConfig):
    """Attention with the feature map elu + 1 in place of a softmax (Katharopoulos et al. 2020).

    Decoding is a recurrence with a state of constant size (sections 3.2 to 3.4).
    """

    # No dropout here and in `PerformerConfig`: there are no attention weights to drop.
    kind: ClassVar[str] = "linear"


def elu_features(x: jax.Array) -> Features:  # [..., H] -> [..., H]
    """Compute elu(x) + 1 (equation 7): x + 1 for x > 0, exp(x) otherwise. The slope at 0 is 1.

    `where` is used because a maximum or minimum of x and 0 would split its gradient at 0.
    """
    below = jnp.exp(jnp.where(x > 0, 0, x))
    values = jnp.maximum(jnp.where(x > 0, x + 1, below), FEATURE_FLOOR)
    return Features(values, log_scale=jnp.zeros(x.shape[:-1]))


@register_mixer
class LinearAttention(Mixer):
    """Linear attention, H features per head: y = phi(q) (sum phi(k) v) / phi(q) (sum phi(k))."""

    config: LinearAttentionConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: LinearAttentionConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def score_flops(config: LinearAttentionConfig, width: int, length: int) -> ScoreFlops:
        head_dim = config.resolved_head_dim(width)
        return feature_map_flops(config, width, num_features=head_dim, num_random_vectors=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LinearAttentionState:
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        num_kv_heads = self.config.resolved_num_kv_heads
        return LinearAttentionState.empty(batch, num_kv_heads, head_dim, head_dim)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LinearAttentionMemory:
        return LinearAttentionMemory(self.init_cache(batch, length))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        y, cache = attend_with_feature_map(self, x, elu_features, inputs)
        return combine_heads(self, y, inputs, cache)

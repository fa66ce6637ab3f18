"""Linear attention with the feature map elu + 1 (Katharopoulos et al. 2020)."""

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
from transformer.attention.projections import combine_heads
from transformer.attention.variants.feature_map_attention import (
    LinearAttentionMemory,
    attend_with_feature_map,
    feature_map_flops,
)
from transformer.attention.variants.linear_configs import LinearAttentionConfig
from transformer.attention.variants.prefix_sums import Features, LinearAttentionState
from transformer.taps import HEAD_OUTPUTS

FEATURE_FLOOR = 1e-18
"""Lower bound of a feature: avoids 0 / 0 for tokens whose entries are all far below zero."""


def elu_features(x: jax.Array) -> Features:  # [..., H] -> [..., H]
    """Compute elu(x) + 1 (equation 7): x + 1 for x > 0, exp(x) otherwise. The slope at 0 is 1.

    `where` is used because a maximum or minimum of x and 0 would split its gradient at 0.
    """
    below = jnp.exp(jnp.where(x > 0, 0, x))
    return Features(jnp.maximum(jnp.where(x > 0, x + 1, below), FEATURE_FLOOR))


@register_mixer
class LinearAttention(Mixer):
    """Linear attention, H features per head: y = phi(q) (sum phi(k) v) / phi(q) (sum phi(k))."""

    config: LinearAttentionConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: LinearAttentionConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(config: LinearAttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LinearAttentionConfig, width: int, length: int) -> ScoreFlops:
        head_dim = config.resolved_head_dim(width)
        return feature_map_flops(config, width, num_features=head_dim, num_random_vectors=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LinearAttentionState:
        return LinearAttentionState.empty(batch, *self.state_sizes())

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LinearAttentionMemory:
        return LinearAttentionMemory.empty(batch, *self.state_sizes())

    @nn.nowrap
    def state_sizes(self) -> tuple[int, int, int]:
        """Return K, M and H: there are as many features as entries of a head."""
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        return self.config.resolved_num_kv_heads, head_dim, head_dim

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        y, cache = attend_with_feature_map(self, x, elu_features, inputs)
        return combine_heads(self, y, inputs, cache)

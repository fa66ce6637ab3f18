"""Performer: softmax attention estimated by random features (Choromanski et al. 2021).

The dot product of two feature vectors is an unbiased estimate of exp(q . k / sqrt(H)). With w drawn
from N(0, I), and x, y the query and the key divided by H^(1/4):

    positive       exp(x . y) = E exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)
    trigonometric  exp(x . y) = exp(|x|^2 / 2) exp(|y|^2 / 2) E cos(w . (x - y))
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from transformer.attention.variants.linear_configs import FeatureMapKind, PerformerConfig
from transformer.attention.variants.prefix_sums import FeatureMap, Features, LinearAttentionState
from transformer.taps import HEAD_OUTPUTS

POSITIVE_FEATURE_FLOOR = math.exp(-60)
"""Lower bound of a positive feature, relative to the largest of its token.

Two tokens without a large feature in common would otherwise give 0 / 0. The floor is below
float32 resolution wherever the product of two vectors exceeds exp(-40).
"""


RELU_FEATURE_OFFSET = 1e-3
"""Constant added to each ReLU feature, as in the paper's code, so that no weight is zero."""


def draw_random_vectors(
    num_vectors: int, head_dim: int, *, orthogonal: bool, seed: tuple[int, ...]
) -> np.ndarray[Any, Any]:  # [count, H]
    """Draw vectors from N(0, I); a function of the seed alone.

    Orthogonal vectors come in blocks of H: rows of a random rotation, rescaled to the norms of
    independent normal vectors (section 2.4). Each vector keeps its distribution, so the estimate
    stays unbiased and its variance falls.
    """
    random = np.random.default_rng(seed)
    normal = random.normal(size=(num_vectors, head_dim))
    if orthogonal:
        lengths = np.linalg.norm(normal, axis=1, keepdims=True)
        blocks = random.normal(size=(-(-num_vectors // head_dim), head_dim, head_dim))
        q, r = np.linalg.qr(blocks)
        signs = np.sign(np.diagonal(r, axis1=1, axis2=2))  # without them no rotation is uniform
        normal = (q * signs[:, None, :]).reshape(-1, head_dim)[:num_vectors] * lengths
    return normal.astype(np.float32)


def make_feature_map(
    kind: FeatureMapKind,
    random_vectors: Any,  # array [M, H], or [M / 2, H] for trigonometric ones
) -> FeatureMap:
    """Return the feature map of queries and keys."""
    return functools.partial(FEATURE_MAPS[kind], random_vectors)


def _scaled(x: jax.Array) -> jax.Array:
    """Divide by H^(1/4), so that x . y = q . k / sqrt(H)."""
    return x * x.shape[-1] ** -0.25


def _positive(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute exp(w . x - |x|^2 / 2) / sqrt(M) (lemma 1), divided by its maximum over M."""
    x = _scaled(x)
    log = x @ random_vectors.T - _half_square(x)[..., None]
    # A query's factor cancels in the quotient and a key's is kept in `log_scale`. The result is the
    # same for any factor, so no gradient has to pass through this one.
    largest = jax.lax.stop_gradient(log.max(axis=-1))
    values = jnp.maximum(jnp.exp(log - largest[..., None]), POSITIVE_FEATURE_FLOOR)
    return Features(values, largest - math.log(len(random_vectors)) / 2)


def _trigonometric(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute exp(|x|^2 / 2) (sin w . x, cos w . x) / sqrt(M / 2) (section 2.3)."""
    x = _scaled(x)
    angles = x @ random_vectors.T
    values = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return Features(values, _half_square(x) - math.log(len(random_vectors)) / 2, signed=True)


def _relu(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute max(0, w . x) / sqrt(M) + 0.001 (section 2.2): no estimate of the softmax."""
    projected = _scaled(x) @ random_vectors.T
    return Features(jax.nn.relu(projected) / math.sqrt(len(random_vectors)) + RELU_FEATURE_OFFSET)


def _half_square(x: jax.Array) -> jax.Array:  # [..., H] -> [...]
    return jnp.sum(jnp.square(x), axis=-1) / 2


FEATURE_MAPS = {"positive": _positive, "trigonometric": _trigonometric, "relu": _relu}


@register_mixer
class Performer(Mixer):
    """Attention by random features: y = phi(q) (sum phi(k) v) / phi(q) (sum phi(k))."""

    config: PerformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: PerformerConfig) -> Abilities:
        return Abilities(weights=False)

    @staticmethod
    def constants(
        config: PerformerConfig, layer: int, width: int
    ) -> np.ndarray[Any, Any]:  # [M, H], or [M / 2, H] of trigonometric features
        """Draw the random vectors from (seed, layer, redraw_index)."""
        return draw_random_vectors(
            config.num_random_vectors,
            config.resolved_head_dim(width),
            orthogonal=config.orthogonal,
            seed=(config.seed, layer, config.redraw_index),
        )

    @staticmethod
    def score_flops(config: PerformerConfig, width: int, length: int) -> ScoreFlops:
        return feature_map_flops(config, width, config.num_features, config.num_random_vectors)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LinearAttentionState:
        return LinearAttentionState.empty(batch, *self.state_sizes())

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LinearAttentionMemory:
        return LinearAttentionMemory.empty(batch, *self.state_sizes())

    @nn.nowrap
    def state_sizes(self) -> tuple[int, int, int]:
        """Return K, M and H."""
        config, head_dim = self.config, self.config.resolved_head_dim(self.context.d_model)
        return config.resolved_num_kv_heads, config.num_features, head_dim

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        constants = inputs.constants
        config, context = self.config, self.context
        if constants is None:  # called by itself: a stack gives each layer its own
            constants = self.constants(config, 0, context.d_model)
        feature_map = make_feature_map(config.feature_map, constants)
        y, cache = attend_with_feature_map(self, x, feature_map, inputs)
        return combine_heads(self, y, inputs, cache)

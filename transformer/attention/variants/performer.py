"""Performer: softmax attention estimated by random features (Choromanski et al. 2021).

The dot product of two feature vectors is an unbiased estimate of exp(q . k / sqrt(H)). With w drawn
from N(0, I), and x, y the query and the key divided by H^(1/4):

    positive       exp(x . y) = E exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)
    trigonometric  exp(x . y) = exp(|x|^2 / 2) exp(|y|^2 / 2) E cos(w . (x - y))
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

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
    FeatureMap,
    Features,
    LinearAttentionMemory,
    LinearAttentionState,
    attend_with_feature_map,
    feature_map_flops,
)
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import Mark, PositiveInt, Seed

POSITIVE_FEATURE_FLOOR = math.exp(-60)
"""Lower bound of a positive feature, relative to the largest of its token.

Two tokens without a large feature in common would otherwise give 0 / 0. The floor is below
float32 resolution wherever the product of two vectors exceeds exp(-40).
"""

RELU_FEATURE_OFFSET = 1e-3
"""Constant added to each ReLU feature, as in the paper's code, so that no weight is zero."""

FeatureMapKind = Literal["positive", "trigonometric", "relu"]


@dataclasses.dataclass(frozen=True)
class PerformerConfig(MultiHeadConfig):
    """FAVOR+ random features (Choromanski et al. 2021, section 2).

    Time and memory are linear in T; the error of the softmax estimate falls as 1 / sqrt(M).

    Positive features have a floor: a weight below exp(-40) of the product of the two tokens'
    largest features may come out larger than the formula says. Trigonometric features have no such
    bound. Where weights are small, their sums are close to zero with either sign and results are
    inaccurate; they are included for comparison.
    """

    kind: ClassVar[str] = "performer"

    num_features: PositiveInt = 128
    """M, number of features. More are closer to softmax and cost more time and memory."""
    feature_map: FeatureMapKind = "positive"
    """positive, trigonometric: estimates of exp(q . k). relu: another function of q and k."""
    orthogonal: bool = True
    """Draw random vectors in orthogonal blocks of H, which lowers the variance."""
    seed: Seed = 0
    """Seed of the random vectors, which all heads of a layer share."""
    redraw_index: Annotated[Seed, Mark.RESUMABLE] = 0
    """Increase it to draw new vectors. They are the mixer's `constants`, inputs of a call, so new
    ones need no recompilation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature_map == "trigonometric" and self.num_features % 2:
            raise ValueError(
                f"PerformerConfig.num_features {self.num_features}: sines and cosines come in "
                "pairs; give an even number"
            )

    @property
    def num_random_vectors(self) -> int:
        """Number of random vectors for M features: a sine and a cosine share one."""
        return self.num_features // 2 if self.feature_map == "trigonometric" else self.num_features


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
        config, head_dim = self.config, self.config.resolved_head_dim(self.context.d_model)
        num_kv_heads = config.resolved_num_kv_heads
        return LinearAttentionState.empty(batch, num_kv_heads, config.num_features, head_dim)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> LinearAttentionMemory:
        return LinearAttentionMemory(self.init_cache(batch, length))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, random_vectors = self.config, inputs.constants
        if random_vectors is None:  # called by itself: a stack gives each layer its own
            random_vectors = self.constants(config, 0, self.context.d_model)
        feature_map = make_feature_map(config.feature_map, random_vectors)
        y, cache = attend_with_feature_map(self, x, feature_map, inputs)
        return combine_heads(self, y, inputs, cache)


def draw_random_vectors(
    num_vectors: int, head_dim: int, *, orthogonal: bool, seed: tuple[int, ...]
) -> Float[np.ndarray, "count H"]:
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
    random_vectors: jax.Array,  # [M, H], or [M / 2, H] for trigonometric ones
) -> FeatureMap:
    """Return the feature map of queries and keys."""
    maps = {"positive": positive, "trigonometric": trigonometric, "relu": relu}
    return functools.partial(maps[kind], random_vectors)


def positive(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute exp(w . x - |x|^2 / 2) / sqrt(M) (lemma 1), divided by its maximum over M."""
    x = _scaled(x)
    log = x @ random_vectors.T - _half_square(x)[..., None]
    # A query's factor cancels in the quotient and a key's is kept in `log_scale`. The result is the
    # same for any factor, so no gradient has to pass through this one.
    largest = jax.lax.stop_gradient(log.max(axis=-1))
    values = jnp.maximum(jnp.exp(log - largest[..., None]), POSITIVE_FEATURE_FLOOR)
    return Features(values, largest - math.log(len(random_vectors)) / 2)


def trigonometric(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute exp(|x|^2 / 2) (sin w . x, cos w . x) / sqrt(M / 2) (section 2.3)."""
    x = _scaled(x)
    angles = x @ random_vectors.T
    values = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return Features(values, _half_square(x) - math.log(len(random_vectors)) / 2, signed=True)


def relu(random_vectors: jax.Array, x: jax.Array) -> Features:
    """Compute max(0, w . x) / sqrt(M) + 0.001 (section 2.2): no estimate of the softmax."""
    projected = _scaled(x) @ random_vectors.T
    values = jax.nn.relu(projected) / math.sqrt(len(random_vectors)) + RELU_FEATURE_OFFSET
    return Features(values, log_scale=jnp.zeros(x.shape[:-1]))


def _scaled(x: jax.Array) -> jax.Array:
    """Divide by H^(1/4), so that x . y = q . k / sqrt(H)."""
    return x * x.shape[-1] ** -0.25


def _half_square(x: Float[Array, "... H"]) -> Float[Array, "..."]:
    return jnp.sum(jnp.square(x), axis=-1) / 2

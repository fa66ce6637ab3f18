"""Random features: vectors whose products are an estimate of exp(q . k / sqrt(H)).

Choromanski et al. 2021 (Rethinking Attention with Performers). With w drawn from N(0, I) and x, y
the query and the key, each over H^(1/4):

    positive       exp(x . y) = E exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)
    trigonometric  exp(x . y) = exp(|x|^2 / 2) exp(|y|^2 / 2) E cos(w . (x - y))
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.variants.configs import FeatureMapKind as FeatureMapKind
from transformer.variants.prefix_sums import FeatureMap, Features

POSITIVE_FEATURE_FLOOR = math.exp(-60)
"""Of a positive feature, beside the largest of its token: two tokens without a feature in common
still have a weight, where 0 / 0 would be the quotient. It is beyond float32's digits wherever the
product of two vectors is more than exp(-40)."""

RELU_FEATURE_OFFSET = 1e-3
"""What the paper's code adds to each ReLU feature, so that weights are not zero."""


def draw_random_vectors(
    num_vectors: int, head_dim: int, *, orthogonal: bool, seed: tuple[int, ...]
) -> np.ndarray[Any, Any]:  # [count, H]
    """Vectors of N(0, I), as a function of the seed alone.

    Orthogonal ones come in blocks of H at right angles to each other: rows of a random rotation,
    with lengths drawn anew as those of normal vectors (section 2.4). Each by itself is distributed
    as before, so the estimate stays unbiased, and its variance is less.
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
    """The map of queries and of keys."""
    return functools.partial(FEATURE_MAPS[kind], random_vectors)


def _scaled(x: jax.Array) -> jax.Array:
    """What makes x . y of q . k / sqrt(H)."""
    return x * x.shape[-1] ** -0.25


def _positive(directions: jax.Array, x: jax.Array) -> Features:
    """exp(w . x - |x|^2 / 2) / sqrt(M) (lemma 1), over the largest of each token."""
    x = _scaled(x)
    log = x @ directions.T - _half_square(x)[..., None]
    # Exact with any factor, so no gradient has to go through this one.
    largest = jax.lax.stop_gradient(log.max(axis=-1))
    values = jnp.maximum(jnp.exp(log - largest[..., None]), POSITIVE_FEATURE_FLOOR)
    return Features(values, largest - math.log(len(directions)) / 2)


def _trigonometric(directions: jax.Array, x: jax.Array) -> Features:
    """exp(|x|^2 / 2) (sin w . x, cos w . x) / sqrt(M / 2) (section 2.3)."""
    x = _scaled(x)
    angles = x @ directions.T
    values = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return Features(values, _half_square(x) - math.log(len(directions)) / 2, signed=True)


def _relu(directions: jax.Array, x: jax.Array) -> Features:
    """max(0, w . x) / sqrt(M) + 0.001 (section 2.2): another kernel, no estimate of softmax."""
    projected = _scaled(x) @ directions.T
    return Features(jax.nn.relu(projected) / math.sqrt(len(directions)) + RELU_FEATURE_OFFSET)


def _half_square(x: jax.Array) -> jax.Array:  # [..., H] -> [...]
    return jnp.sum(jnp.square(x), axis=-1) / 2


FEATURE_MAPS = {"positive": _positive, "trigonometric": _trigonometric, "relu": _relu}

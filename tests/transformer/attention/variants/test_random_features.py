"""Random features against their formulas, and their statistics over many seeds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.feature_maps import FORMULAS
from tests.transformer.formulas import Array, assert_close, normal
from transformer.attention.variants.performer import (
    FeatureMapKind,
    draw_random_vectors,
    make_feature_map,
)

H, SEEDS = 8, 500


@pytest.mark.parametrize("kind", ["positive", "trigonometric", "relu"])
def test_features_match_formula(kind: Any) -> None:
    """The extracted factor is exact too."""
    directions: Any = draw_random_vectors(13, H, orthogonal=True, seed=(1,))
    x = normal(0, 2, 3, 5, H)
    result = jax.device_get(jax.jit(make_feature_map(kind, directions))(x))
    factor = np.exp(result.log_scale)[..., None]
    assert_close(result.values * factor, FORMULAS[kind](np.float64(x), directions))
    if kind == "positive":
        assert_close(result.values.max(-1), np.ones((2, 3, 5)))


def test_positive_features_do_not_overflow() -> None:
    """Their logarithms, in float64, match those of the values times the factor."""
    directions: Any = draw_random_vectors(13, H, orthogonal=True, seed=(1,))
    x = 100 * normal(0, 1, 7, 1, H)
    result = jax.jit(make_feature_map("positive", directions))(x)
    y = np.float64(x) / H**0.25
    log = y @ directions.T - (y * y).sum(-1)[..., None] / 2 - np.log(13) / 2
    top = log.max(-1, keepdims=True)
    assert_close(result.log_scale, top[..., 0])
    assert_close(np.log(result.values), np.maximum(log - top, -60), tolerance=1e-4)


def test_orthogonal_vectors_within_blocks_have_gaussian_norms() -> None:
    drawn = draw_random_vectors(3 * H - 2, H, orthogonal=True, seed=(5, 0, 0))
    for block in (drawn[:H], drawn[H : 2 * H], drawn[2 * H :]):
        gram = block @ block.T
        assert_close(gram, np.diag(np.diag(gram)))
    lengths = np.linalg.norm(drawn, axis=1)
    assert lengths.std() > 0.1
    many = draw_random_vectors(4000, H, orthogonal=True, seed=(5,))
    assert np.abs(many.mean(0)).max() < 0.06  # four standard errors
    assert_close(many.T @ many / 4000, np.eye(H), tolerance=0.09)


def test_random_vectors_depend_on_the_seed() -> None:
    draw = functools.partial(draw_random_vectors, 5, 3, orthogonal=True)
    assert np.array_equal(draw(seed=(0, 1, 2)), draw(seed=(0, 1, 2)))
    others = [(1, 1, 2), (0, 0, 2), (0, 1, 0), (2, 1, 0)]
    assert not any(np.allclose(draw(seed=(0, 1, 2)), draw(seed=other)) for other in others)


def make_pair(product: float) -> Any:
    """Return x and y [2, H] of equal norm with x . y / sqrt(H) = product.

    The product must not be large: with a large |x + y|, a few seeds dominate positive features.
    """
    x, across = np.linalg.qr(np.float64(normal(4, H, 2)))[0].T
    length = max(1.0, 1.1 * abs(product) ** 0.5)
    cosine = product / length**2
    y = cosine * x + (1 - cosine**2) ** 0.5 * across
    return (length * H**0.25 * np.array([x, y])).astype(np.float32)


@functools.lru_cache
def estimates(
    kind: FeatureMapKind, orthogonal: bool, features: int, product: float
) -> Array:  # [seeds]
    """Return estimates of exp(x . y / sqrt(H)), one per seed."""
    count = features // 2 if kind == "trigonometric" else features
    drawn = [
        draw_random_vectors(count, H, orthogonal=orthogonal, seed=(7, s)) for s in range(SEEDS)
    ]

    def estimate(directions: Any) -> Any:
        result = make_feature_map(kind, directions)(make_pair(product)[None])
        vectors = result.values * jnp.exp(result.log_scale)[..., None]
        return vectors[0, 0] @ vectors[0, 1]

    return np.asarray(jax.jit(jax.vmap(estimate))(np.array(drawn)))


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
def test_estimates_are_unbiased(kind: FeatureMapKind, orthogonal: bool) -> None:
    for product in (-2.0, 0.5):
        result = estimates(kind, orthogonal, 16, product)
        assert abs(result.mean() - np.exp(product)) < 4 * result.std() / SEEDS**0.5

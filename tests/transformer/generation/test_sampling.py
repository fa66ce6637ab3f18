import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.refused import assert_refused
from transformer.generation.sampling import (
    SamplingConfig,
    apply_temperature,
    apply_top_p,
    argmax_tokens,
    sample_gumbel,
    sample_tokens,
    select_top_k,
)
from transformer.precision import finfo_min

DRAWS = 20_000
SAMPLE = jax.jit(sample_tokens, static_argnums=3)


def logits_of(*probabilities: float) -> jax.Array:  # [1, V]
    return jnp.log(jnp.array([probabilities]))


def draw_many(
    config: SamplingConfig, logits: jax.Array, draws: int = DRAWS
) -> np.ndarray:  # [draws]
    """Return draws from one distribution [1, V], each at its own position."""
    rows = jnp.broadcast_to(logits, (draws, logits.shape[1]))
    keys = jnp.broadcast_to(jax.random.key(3), draws)
    positions = jnp.arange(draws)
    return np.asarray(SAMPLE(rows, keys, positions, config))


def allowed_tokens(logits: jax.Array) -> list[set[int]]:
    """Return the tokens of each row [V] that can be drawn."""
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in np.asarray(logits)]


@pytest.mark.parametrize(("mass", "count"), [(0.1, 1), (0.45, 3), (1.0, 5)])
def test_nucleus_breaks_ties_by_index(mass: float, count: int) -> None:
    assert allowed_tokens(apply_top_p(logits_of(0.2, 0.2, 0.2, 0.2, 0.2), mass)) == [
        set(range(count))
    ]


def test_nucleus_excludes_tokens_of_probability_zero() -> None:
    certain = jnp.array([[-jnp.inf, 5.0, -jnp.inf]])
    assert allowed_tokens(apply_top_p(certain, 0.999)) == [{1}]


@pytest.mark.parametrize("mass", [1e-9, 0.03, 0.77, 0.9999])
def test_nucleus_matches_sorting(mass: float) -> None:
    logits = np.random.default_rng(0).normal(size=(7, 211)).astype(np.float32) * 3
    exp_logits = np.exp(logits.astype(np.float64))
    p = exp_logits / exp_logits.sum(-1, keepdims=True)
    expected = []
    for row in p:
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        expected.append(set(order[before < mass].tolist()))
    actual = apply_top_p(jnp.asarray(logits), mass)
    assert allowed_tokens(actual) == expected
    chosen = np.isfinite(actual)
    np.testing.assert_array_equal(np.asarray(actual)[chosen], logits[chosen])


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [4]), (3, [4, 0, 1])],
)
def test_top_k_breaks_ties_by_index(k: int, expected: list[int]) -> None:
    logits = jnp.array([[2.0, 1.0, -3.0, 1.0, 5.0]])
    values, words = select_top_k(logits, k)
    assert words.tolist() == [expected]
    np.testing.assert_array_equal(values, np.asarray(logits)[:, expected])


@pytest.mark.parametrize("k", [0, 5])
def test_top_k_of_the_whole_vocabulary(k: int) -> None:
    logits = jnp.array([[2.0, 1.0, -3.0, 1.0, 5.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    values, words = select_top_k(logits, k)
    assert words.tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_array_equal(values, logits)


def test_greedy_is_argmax() -> None:
    logits = jnp.array([[1.0, 7.0, 7.0], [-jnp.inf, -jnp.inf, -2.0], [3.0, jnp.nan, 4.0]])
    assert argmax_tokens(logits).tolist() == [1, 2, 0]
    assert argmax_tokens(logits).dtype == jnp.int32


def test_temperature_by_hand() -> None:
    np.testing.assert_allclose(
        apply_temperature(jnp.array([[3.0, 1.0, 5.0]]), 0.5), [[-4.0, -8.0, 0.0]]
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SamplingConfig(), [0.5, 0.25, 0.2, 0.05]),
        (SamplingConfig(temperature=0.5), [0.7067, 0.1767, 0.1131, 0.0071]),
        (SamplingConfig(top_p=0.8), [0.5263, 0.2632, 0.2105, 0]),
        (SamplingConfig(top_k=3), [0.5263, 0.2632, 0.2105, 0]),
        # Of the two that top-k leaves, the first has 2/3 of the mass.
        (SamplingConfig(top_k=2, top_p=0.6), [1, 0, 0, 0]),
        (SamplingConfig(temperature=1e30), [0.25, 0.25, 0.25, 0.25]),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(config: SamplingConfig, expected: list[float]) -> None:
    actual = np.bincount(draw_many(config, logits_of(0.5, 0.25, 0.2, 0.05)), minlength=4) / DRAWS
    for frequency, p in zip(actual, expected, strict=True):
        assert abs(frequency - p) <= 4.5 * math.sqrt(p * (1 - p) / DRAWS) + 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_temperature_0_is_greedy(temperature: float) -> None:
    logits = jnp.array([[1.0, 3.0, 3.0 + 1e-6], [9.0, -1.0, 8.999]])
    keys, positions = jax.random.split(jax.random.key(0), 2), jnp.array([5, 6])
    config = SamplingConfig(temperature=temperature)
    assert sample_tokens(logits, keys, positions, config).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (SamplingConfig(temperature=0), jnp.float32),
        (SamplingConfig(temperature=1e38), jnp.bfloat16),
        (SamplingConfig(temperature=1e308, top_k=5, top_p=0.999999), jnp.float16),
        (SamplingConfig(top_k=4), jnp.float32),
        (SamplingConfig(top_p=1 - 1e-12), jnp.float32),
    ],
    ids=str,
)
def test_vocabulary_padding_is_never_drawn(config: SamplingConfig, dtype: jnp.dtype) -> None:
    """Also if real tokens have hardly larger logits."""
    padding = float(finfo_min(dtype))
    for real in ([-1.0, 2.0], [-65000.0, -65000.0]):
        logits = jnp.array([[padding, *real, padding, padding]], dtype)
        assert set(draw_many(config, logits, 500).tolist()) <= {1, 2}


def test_draw_depends_only_on_its_row_key_and_position() -> None:
    logits = jax.random.normal(jax.random.key(0), (3, 97))
    keys, positions = jax.random.split(jax.random.key(1), 3), jnp.array([4, 5, 6])
    config = SamplingConfig(top_p=0.9)
    together = SAMPLE(logits, keys, positions, config)
    for i in range(3):
        alone = SAMPLE(logits[i : i + 1], keys[i : i + 1], positions[i : i + 1], config)
        assert alone.tolist() == together[i : i + 1].tolist()


def test_draws_differ_between_keys_and_positions() -> None:
    """Fifty draws from 97 equal tokens give about 39 different ones."""
    logits, keys = jnp.zeros((50, 97)), jax.random.split(jax.random.key(0), 50)
    for given in (
        (keys, jnp.zeros(50, jnp.int32)),
        (jnp.broadcast_to(keys[0], 50), jnp.arange(50)),
    ):
        assert len(set(sample_tokens(logits, *given, SamplingConfig()).tolist())) > 30


def test_draw_excludes_tokens_of_probability_zero() -> None:
    keys = jax.random.split(jax.random.key(0), 200)
    logits = jnp.broadcast_to(jnp.array([[-jnp.inf, 0.0, -jnp.inf, 0.0]]), (200, 4))
    assert set(sample_gumbel(logits, keys).tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (SamplingConfig, dict(temperature=-0.1)),
        (SamplingConfig, dict(temperature=math.nan)),
        (SamplingConfig, dict(top_k=-1)),
        (SamplingConfig, dict(top_p=0.0)),
        (SamplingConfig, dict(top_p=1.5)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, normal
from tests.transformer.refused import assert_refused
from transformer.generation.sampling import (
    SamplingConfig,
    SamplingValues,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    argmax_tokens,
    draw_tokens,
    sample_gumbel,
    sample_tokens,
)

DRAWS = 20_000
SAMPLE = jax.jit(sample_tokens, static_argnums=3)
TOP_K = jax.jit(apply_top_k)
TOP_P = jax.jit(apply_top_p)
SPLIT = jax.jit(jax.random.split, static_argnums=1)


def logits_of(*probabilities: float) -> Array:  # [1, V]
    return np.log(np.array([probabilities], np.float32))


def split(seed: int, count: int) -> jax.Array:  # [count] keys
    """Return `jax.random.split`, from a program that tests share."""
    return SPLIT(jax.random.key(seed), count)


def draw_many(config: SamplingConfig, logits: Array, draws: int = DRAWS) -> np.ndarray:  # [draws]
    """Return draws from one distribution [1, V], each at its own position."""
    rows = np.broadcast_to(logits, (draws, logits.shape[1]))
    return np.asarray(draw_rows(rows, np.arange(draws), config))


@functools.partial(jax.jit, static_argnums=2)
def draw_rows(rows: Any, positions: Any, config: SamplingConfig) -> jax.Array:  # [draws]
    keys = jnp.broadcast_to(jax.random.key(3), len(rows))
    return sample_tokens(rows, keys, positions, config)


def column(value: float, dtype: Any = np.float32) -> np.ndarray:  # [1, 1]
    return np.array([[value]], dtype)


def allowed_tokens(logits: Any) -> list[set[int]]:
    """Return the tokens of each row [V] that can be drawn."""
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in np.asarray(logits)]


@pytest.mark.parametrize(("mass", "count"), [(0.1, 1), (0.45, 3), (1.0, 5)])
def test_nucleus_breaks_ties_by_index(mass: float, count: int) -> None:
    assert allowed_tokens(TOP_P(logits_of(0.2, 0.2, 0.2, 0.2, 0.2), column(mass))) == [
        set(range(count))
    ]


def test_nucleus_excludes_tokens_of_probability_zero() -> None:
    certain = np.array([[-np.inf, 5.0, -np.inf]], np.float32)
    assert allowed_tokens(TOP_P(certain, column(0.999))) == [{1}]


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
    actual = np.asarray(TOP_P(logits, np.broadcast_to(column(mass), (7, 1))))
    assert allowed_tokens(actual) == expected
    chosen = np.isfinite(actual)
    np.testing.assert_array_equal(actual[chosen], logits[chosen])


@pytest.mark.parametrize(
    ("k", "expected"),
    [(0, {0, 1, 2, 3, 4}), (1, {4}), (3, {4, 0, 1}), (4, {4, 0, 1, 3}), (9, {0, 1, 2, 3, 4})],
)
def test_top_k_breaks_ties_by_index(k: int, expected: set[int]) -> None:
    logits = np.array([[2.0, 1.0, -3.0, 1.0, 5.0]], np.float32)
    actual = np.asarray(TOP_K(logits, column(k, np.int32)))
    assert allowed_tokens(actual) == [expected]
    chosen = np.isfinite(actual)
    np.testing.assert_array_equal(actual[chosen], logits[chosen])


@pytest.mark.parametrize("k", [3, 64, 65, 96])
def test_top_k_matches_sorting(k: int) -> None:
    """With many ties, and on both sides of the k from which on no sort is used."""
    logits = np.random.default_rng(1).integers(-9, 9, (5, 97)).astype(np.float32)
    order = np.argsort(-logits, axis=-1, kind="stable")
    actual = TOP_K(logits, np.full((5, 1), k, np.int32))
    assert allowed_tokens(actual) == [set(row[:k].tolist()) for row in order]


def test_rows_have_settings_of_their_own() -> None:
    """Greedy, whole, top-k and top-p rows in one batch draw what each draws alone."""
    configs = [
        SamplingConfig(temperature=0, top_k=3),
        SamplingConfig(),
        SamplingConfig(temperature=1.7),
        SamplingConfig(top_k=5),
        SamplingConfig(temperature=0.5, top_p=0.7),
        SamplingConfig(temperature=3.0, top_k=11, top_p=0.8),
    ]
    logits, positions = normal(0, 6, 97), np.arange(6)
    keys = split(1, 6)
    each = [config.values(1) for config in configs]
    values = SamplingValues(*(np.concatenate(column) for column in zip(*each, strict=True)))
    together = jax.jit(draw_tokens)(logits, keys, positions, values)
    alone = [SAMPLE(logits, keys, positions, config)[row] for row, config in enumerate(configs)]
    assert together.tolist() == [int(token) for token in alone]


def test_greedy_is_argmax() -> None:
    rows = [[1.0, 7.0, 7.0], [-np.inf, -np.inf, -2.0], [3.0, np.nan, 4.0]]
    tokens = jax.jit(argmax_tokens)(np.array(rows, np.float32))
    assert tokens.tolist() == [1, 2, 0]
    assert tokens.dtype == jnp.int32


def test_temperature_by_hand() -> None:
    np.testing.assert_allclose(
        jax.jit(apply_temperature)(np.array([[3.0, 1.0, 5.0]]), column(0.5)), [[-4.0, -8.0, 0.0]]
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
    logits = np.array([[1.0, 3.0, 3.0 + 1e-6], [9.0, -1.0, 8.999]], np.float32)
    config = SamplingConfig(temperature=temperature)
    assert SAMPLE(logits, split(0, 2), np.array([5, 6]), config).tolist() == [2, 0]


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
    padding = float(jnp.finfo(dtype).min)
    for real in ([-1.0, 2.0], [-65000.0, -65000.0]):
        logits = np.array([[padding, *real, padding, padding]]).astype(dtype)
        assert set(draw_many(config, logits, 500).tolist()) <= {1, 2}


def test_draw_depends_only_on_its_row_key_and_position() -> None:
    logits, positions = normal(0, 3, 97), np.array([4, 5, 6])
    config = SamplingConfig(top_p=0.9)
    together = np.asarray(SAMPLE(logits, split(1, 3), positions, config))

    @jax.jit
    def draw_alone(logits: Any, positions: Any, row: Any) -> jax.Array:
        key = jax.lax.dynamic_slice_in_dim(jax.random.split(jax.random.key(1), 3), row, 1)
        return sample_tokens(logits, key, positions, config)

    for i in range(3):
        alone = draw_alone(logits[i : i + 1], positions[i : i + 1], i)
        assert alone.tolist() == together[i : i + 1].tolist()


def test_draws_differ_between_keys_and_positions() -> None:
    """Fifty draws from 97 equal tokens give about 39 different ones."""
    logits, config = np.zeros((50, 97), np.float32), SamplingConfig()
    by_key = SAMPLE(logits, split(0, 50), np.zeros(50, int), config)
    by_position = draw_rows(logits, np.arange(50), config)
    for tokens in (by_key, by_position):
        assert len(set(tokens.tolist())) > 30


def test_draw_excludes_tokens_of_probability_zero() -> None:
    row = np.array([[-np.inf, 0.0, -np.inf, 0.0]], np.float32)
    tokens = jax.jit(sample_gumbel)(np.broadcast_to(row, (200, 4)), split(0, 200))
    assert set(tokens.tolist()) == {1, 3}


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

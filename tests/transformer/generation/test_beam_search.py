import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.refused import assert_refused
from transformer.generation.beam_search import NO_TOKEN, BeamSearchConfig, Hypotheses, beam_search

V, T, STOP = 5, 4, 3


def random_language(seed: int, batch: int = 2) -> np.ndarray:  # [B, V, V] log-probabilities
    """Return a random language in which a token depends on the previous one, for each example."""
    logits = 2 * np.random.default_rng(seed).standard_normal((batch, V, V)).astype(np.float32)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def search(
    table: np.ndarray, config: BeamSearchConfig, limits: list[int], stops: tuple[int, ...] = (STOP,)
) -> Hypotheses:
    """Run a beam search whose cache holds each example's number and the sum of its tokens."""
    batch = len(table)

    def advance(cache: Any, tokens: jax.Array, positions: jax.Array) -> tuple[Any, jax.Array]:
        [(rows, sums)] = cache
        followed = positions + 0 * sums
        sums = sums + tokens
        # A cache from the wrong parent would be detected: its sum would not match the tokens.
        return ((rows, sums),), jnp.asarray(table)[rows, tokens] + 0 * followed[:, None]

    cache = ((jnp.arange(batch), jnp.zeros(batch, jnp.int32)),)
    return jax.jit(
        lambda: beam_search(
            advance,
            cache,
            jnp.asarray(table)[:, 0],
            jnp.ones(batch, jnp.int32),
            jnp.array(limits),
            jnp.array(stops),
            config=config,
            max_new_tokens=T,
        )
    )()


def score(table: np.ndarray, tokens: tuple[int, ...], alpha: float) -> float:
    total, last = 0.0, 0
    for token in tokens:
        total += table[last, token]
        last = token
    return total / ((5 + len(tokens)) / 6) ** alpha


def all_hypotheses(limit: int) -> list[tuple[int, ...]]:
    """Return all sequences that end with the stop token or have the largest length."""
    words = [token for token in range(V) if token != STOP]
    actual: list[tuple[int, ...]] = list(itertools.product(words, repeat=limit))
    for length in range(limit):
        actual += [(*tokens, STOP) for tokens in itertools.product(words, repeat=length)]
    return actual


@pytest.mark.sampled("2.0")
@pytest.mark.parametrize(("alpha", "limits"), [(0.6, [4, 4]), (2.0, [2, 3])])
def test_wide_beam_finds_the_best_hypothesis(alpha: float, limits: list[int]) -> None:
    table = random_language(1)
    result = search(table, BeamSearchConfig(num_beams=300, length_penalty=alpha), limits)
    for example, limit in enumerate(limits):
        scores = {each: score(table[example], each, alpha) for each in all_hypotheses(limit)}
        best = sorted(scores, key=lambda each: -scores[each])[:5]
        for rank, tokens in enumerate(best):
            row = np.asarray(result.tokens[example, rank])
            expected = [token for token in tokens if token != STOP]
            assert row[row != NO_TOKEN].tolist() == expected
            assert np.isclose(result.scores[example, rank], scores[tokens], rtol=1e-5)


def expected_best(
    table: np.ndarray, beams: int, alpha: float, limit: int, stops: tuple[int, ...]
) -> tuple[float, list[int]]:
    """Return the best finished hypothesis, with lists and without early stopping."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for step in range(limit):
        grown = [
            (total + table[tokens[-1] if tokens else 0, token], (*tokens, token))
            for total, tokens in alive
            for token in range(V)
        ]
        grown = sorted(grown, key=lambda each: -each[0])
        grown = grown[: (len(stops) + 1) * beams]
        over = [each for each in grown if each[1][-1] in stops or step + 1 == limit]
        finished += [(total / ((5 + step + 1) / 6) ** alpha, tokens) for total, tokens in over]
        alive = [each for each in grown if each[1][-1] not in stops][:beams]
    best, tokens = max(finished)
    return best, [token for token in tokens if token not in stops]


@pytest.mark.sampled("[stops0-3-3")
@pytest.mark.parametrize(("seed", "beams"), [(2, 1), (3, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("stops", [(STOP,), (STOP, 1)])
def test_matches_search_with_lists(seed: int, beams: int, stops: tuple[int, ...]) -> None:
    table = random_language(seed)
    result = search(table, BeamSearchConfig(num_beams=beams, length_penalty=1.0), [T, T], stops)
    for example in range(2):
        best, tokens = expected_best(table[example], beams, 1.0, T, stops)
        row = np.asarray(result.tokens[example, 0])
        assert row[row != NO_TOKEN].tolist() == tokens
        assert np.isclose(result.scores[example, 0], best, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (BeamSearchConfig, dict(num_beams=0)),
        (BeamSearchConfig, dict(length_penalty=-1.0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)

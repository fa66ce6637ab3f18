from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import array, assert_close, normal
from transformer.routing import load_balance, route, router_z

B, T, E, C = 3, 7, 5, 2
REAL: Any = np.arange(T)[None] < np.array([T, 4, 1])[:, None]


def test_two_of_three_experts_by_hand() -> None:
    logits = array(np.log([[[1.0, 6.0, 3.0]]])).astype(np.float32)
    switched = route(logits, 2, renormalise=False)
    assert switched.experts.tolist() == [[[1, 2]]]
    assert_close(switched.gates, np.array([[[0.6, 0.3]]]), 1e-6)
    assert_close(route(logits, 2, renormalise=True).gates, np.array([[[2 / 3, 1 / 3]]]), 1e-6)


@pytest.mark.parametrize("chosen", [2, 3, E])
def test_renormalised_gates_are_the_softmax_over_the_chosen_logits(chosen: int) -> None:
    """Shazeer et al. 2017, equations 3 and 5, without the noise."""
    logits: Any = normal(0, B, T, E)
    routing = route(logits, chosen, renormalise=True)
    for b, t in np.ndindex(B, T):
        likeliest = np.argsort(-logits[b, t])[:chosen]
        assert routing.experts[b, t].tolist() == likeliest.tolist()
        assert_close(routing.gates[b, t], formulas.softmax(logits[b, t, likeliest]), 1e-6)


def test_of_experts_that_are_alike_the_first_are_chosen() -> None:
    routing = route(array(np.zeros((1, 1, E))), 3, renormalise=True)
    assert routing.experts.tolist() == [[[0, 1, 2]]]


def test_padding_has_no_gates() -> None:
    gates = route(normal(0, B, T, E), C, renormalise=True, real=REAL).gates
    assert_close(np.sum(gates, axis=-1), REAL.astype(np.float32), 1e-6)


def balance(probabilities: Any, experts: Any, real: Any) -> float:
    """Fedus et al. 2022, equation 4, of each example; their mean by tokens."""
    total = 0.0
    for b in range(B):
        tokens = np.flatnonzero(real[b])
        for e in range(E):
            f = np.mean([np.mean(experts[b, t] == e) for t in tokens])
            total += len(tokens) * E * f * np.mean(probabilities[b, tokens, e])
    return total / real.sum()


@pytest.mark.parametrize("real", [REAL, np.ones((B, T), bool)], ids=["padded", "full"])
def test_losses_against_numpy(real: Any) -> None:
    logits = normal(0, B, T, E)
    routing = route(logits, C, renormalise=True, real=real)
    expected = balance(np.asarray(routing.probabilities), np.asarray(routing.experts), real)
    assert_close(jax.jit(load_balance)(routing), np.float64(expected))
    squares = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    assert_close(jax.jit(router_z)(logits, real), squares[real].mean())


@pytest.mark.slow
def test_the_balance_is_1_when_experts_are_used_alike_and_e_when_only_one_is() -> None:
    sure = array(100 * np.eye(E, dtype=np.float32))[None]
    even = route(sure, 1, renormalise=False)
    assert float(load_balance(even)) == pytest.approx(1)
    one = route(sure[:, [3, 3, 3]], 1, renormalise=False)
    assert float(load_balance(one)) == pytest.approx(E)


def test_a_batch_of_padding_has_no_losses() -> None:
    logits, nothing = normal(0, B, T, E), array(np.zeros((B, T), bool))
    assert float(load_balance(route(logits, C, renormalise=True, real=nothing))) == 0
    assert float(router_z(logits, nothing)) == 0

"""Adam with L2, and AdamW, which differ in where the decay is."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.train.optim.support import (
    MATRICES,
    RATES,
    SHAPES,
    Array,
    Layer,
    assert_like,
    by_layers,
    drawn,
    updated,
)
from tests.train.support import light_compiler as light_compiler
from train.optim.adam import Adam, AdamW

B1, B2, EPSILON = 0.8, 0.9, 1e-3


def adam(l2: float = 0.0, decay: float = 0.0) -> Layer:
    """Loshchilov and Hutter 2019, algorithm 2: l2 in line 6, the decoupled decay in line 12."""

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        m = v = np.zeros(())
        for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
            matrix = name in MATRICES
            g = g + l2 * w if matrix else g
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * g**2
            direction = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPSILON)
            w = w - rate * (direction + (decay * w if matrix else 0))
        return w

    return layer


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_matches_formula(decay: float) -> None:
    config = AdamW(beta1=B1, beta2=B2, epsilon=EPSILON, weight_decay=decay)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adam(decay=decay)))


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_adam_matches_formula(l2: float) -> None:
    config = Adam(beta1=B1, beta2=B2, epsilon=EPSILON, l2=l2)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adam(l2=l2)))


def test_only_matrices_decay() -> None:
    with_decay = updated(AdamW(weight_decay=0.5), drawn(0), rates=RATES[:1])
    without = updated(AdamW(weight_decay=0.0), drawn(0), rates=RATES[:1])
    for name in SHAPES:
        taken = RATES[0] * 0.5 * drawn(0)[name] * (name in MATRICES)
        difference = np.asarray(without[name]) - np.asarray(with_decay[name])
        np.testing.assert_allclose(difference, taken, atol=1e-6, err_msg=name)

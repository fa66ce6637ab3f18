from collections.abc import Sequence

import numpy as np

from tests.train.optim.support import MATRICES, Array, assert_like, by_layers, drawn, updated
from tests.train.support import light_compiler as light_compiler
from train.optim.lion import Lion


def lion(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
    """Chen et al. 2023, program 1."""
    m = np.zeros_like(w)
    for g, rate in zip(grads, rates, strict=True):
        direction = np.sign(0.8 * m + 0.2 * g)
        m = 0.7 * m + 0.3 * g
        w = w - rate * (direction + (0.3 * w if name in MATRICES else 0))
    return w


def test_lion_matches_formula() -> None:
    found = updated(Lion(beta1=0.8, beta2=0.7, weight_decay=0.3), drawn(0))
    assert_like(found, by_layers(drawn(0), lion))

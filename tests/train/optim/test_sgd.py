from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tests.train.optim.support import (
    AXES,
    MATRICES,
    Array,
    Layer,
    assert_like,
    by_layers,
    drawn,
    updated,
)
from tests.train.support import light_compiler as light_compiler
from train.optim.registry import make_optimizer
from train.optim.sgd import Sgd


def sgd(momentum: float, nesterov: bool, l2: float) -> Layer:
    """Sutskever et al. 2013, equations 1 to 4, the rate taken out of the velocity."""

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        velocity = np.zeros(())
        for g, rate in zip(grads, rates, strict=True):
            g = g + l2 * w if name in MATRICES else g
            velocity = momentum * velocity + g
            w = w - rate * (g + momentum * velocity if nesterov else velocity)
        return w

    return layer


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.7, False), (0.7, True)])
def test_sgd_matches_formula(momentum: float, nesterov: bool, l2: float) -> None:
    config = Sgd(momentum=momentum, nesterov=nesterov, l2=l2)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), sgd(momentum, nesterov, l2)))


@pytest.mark.parametrize(("momentum", "kept"), [(0.9, 4), (0.0, 0)])
def test_sgd_state_size(momentum: float, kept: int) -> None:
    state = make_optimizer(Sgd(momentum=momentum), AXES).init(drawn(0))
    size = sum(leaf.size for leaf in drawn(0).values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == kept * size

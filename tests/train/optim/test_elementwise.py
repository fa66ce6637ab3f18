"""SGD, Adam, AdamW and Lion against the formulas of their papers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from train.optim.adamw_8bit import AdamW8bit
from train.optim.elementwise import Adam, AdamW, Lion, Sgd
from train.optim.muon import Muon
from train.optim.optimizer import Optimizer, is_hidden_matrix
from transformer.layers.logical_axes import LogicalAxes


def sgd(momentum: float, nesterov: bool, l2: float) -> Layer:
    """Compute Sutskever et al. 2013, equations 1 to 4, with the rate taken out of the velocity."""

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        velocity = np.zeros(())
        for g, rate in zip(grads, rates, strict=True):
            g = g + l2 * w if name in MATRICES else g
            velocity = momentum * velocity + g
            w = w - rate * (g + momentum * velocity if nesterov else velocity)
        return w

    return layer


@pytest.mark.parametrize(
    ("momentum", "nesterov", "l2"),
    [(0.0, False, 0.3), (0.7, False, 0.0), (0.7, False, 0.3), (0.7, True, 0.3)],
)
def test_sgd_matches_formula(momentum: float, nesterov: bool, l2: float) -> None:
    config = Sgd(momentum=momentum, nesterov=nesterov, l2=l2)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), sgd(momentum, nesterov, l2)))


@pytest.mark.parametrize(("momentum", "kept"), [(0.9, 4), (0.0, 0)])
def test_sgd_state_size(momentum: float, kept: int) -> None:
    state = Sgd(momentum=momentum).make(AXES).init(drawn(0))
    size = sum(leaf.size for leaf in drawn(0).values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == kept * size


B1, B2, EPSILON = 0.8, 0.9, 1e-3
HIDDEN = MATRICES - {"embedding", "positions"}


def adam(l2: float = 0.0, decay: float = 0.0, hidden: float = 1.0) -> Layer:
    """Compute Loshchilov and Hutter 2019, algorithm 2: L2 in line 6, decoupled decay in line 12."""

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        m = v = np.zeros(())
        for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
            matrix = name in MATRICES
            g = g + l2 * w if matrix else g
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * g**2
            direction = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPSILON)
            direction = hidden * direction if name in HIDDEN else direction
            w = w - rate * (direction + (decay * w if matrix else 0))
        return w

    return layer


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_adam_matches_formula(l2: float) -> None:
    config = Adam(beta1=B1, beta2=B2, epsilon=EPSILON, l2=l2)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adam(l2=l2)))


@pytest.mark.parametrize("hidden", [1.0, 0.25])
def test_adamw_matches_formula(hidden: float) -> None:
    """The factor of hidden matrices does not apply to the decay."""
    config = AdamW(beta1=B1, beta2=B2, epsilon=EPSILON, weight_decay=0.3, matrix_lr_factor=hidden)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adam(decay=0.3, hidden=hidden)))


def test_adam_scales_hidden_matrices() -> None:
    config = Adam(beta1=B1, beta2=B2, epsilon=EPSILON, l2=0.3, matrix_lr_factor=4.0)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adam(l2=0.3, hidden=4.0)))


@pytest.mark.parametrize("config", [Adam(), AdamW(), AdamW8bit(), Muon()])
def test_defaults_of_adam(config: Optimizer) -> None:
    """Gradients of optax's epsilon: each default counts. Muon updates a table by Adam."""
    nesterov = isinstance(config, Muon)
    theirs = optax.scale_by_adam(b1=0.9, b2=0.95, nesterov=nesterov)
    ours = config.make({"w": AXES["embedding"]})
    params = {"w": jnp.ones((7, 5))}
    decay = 0.1 if isinstance(config, (AdamW, AdamW8bit)) else 0.0
    state, expected_state = ours.init(params), theirs.init(params)
    for scale in (1e-8, 3e-8):
        grads = {"w": jnp.asarray(drawn(1)["embedding"] * np.float32(scale))}
        actual, state = ours.update(grads, state, params)
        expected, expected_state = theirs.update(grads, expected_state, params)
        np.testing.assert_allclose(actual["w"], np.asarray(expected["w"]) + decay, rtol=1e-5)


@pytest.mark.parametrize("name", ["vocab", "positions", "types", "features"])
def test_tables_and_input_layers_are_not_hidden_matrices(name: str) -> None:
    assert is_hidden_matrix(LogicalAxes((), ("mlp",), ("embed",)))
    assert not is_hidden_matrix(LogicalAxes((), (name,), ("embed",)))
    assert not is_hidden_matrix(LogicalAxes((), (), ("embed",)))


def lion(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
    """Compute Chen et al. 2023, program 1."""
    m = np.zeros_like(w)
    for g, rate in zip(grads, rates, strict=True):
        direction = np.sign(0.8 * m + 0.2 * g)
        m = 0.7 * m + 0.3 * g
        w = w - rate * (direction + (0.3 * w if name in MATRICES else 0))
    return w


def test_lion_matches_formula() -> None:
    actual = updated(Lion(beta1=0.8, beta2=0.7, weight_decay=0.3), drawn(0))
    assert_like(actual, by_layers(drawn(0), lion))

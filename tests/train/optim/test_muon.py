from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.optim.support import RATES, SHAPES, drawn, gradients, updated
from tests.train.support import assert_close
from tests.train.support import light_compiler as light_compiler
from train.optim.muon import Muon
from train.optim.optimizer_registry import make_optimizer
from transformer.layers.logical_axes import LogicalAxes


def newton_schulz(x: np.ndarray, config: Muon) -> np.ndarray:
    """Compute Jordan et al. 2024: X <- a X + (b A + c A A) X with A = X X^T.

    With `aol`, X is first scaled: each row by the sum of its products with all rows.
    """
    if len(x) > x.shape[1]:
        return newton_schulz(x.T, config).T
    if config.preconditioning == "aol":
        x = x / np.sqrt(np.abs(x @ x.T).sum(1, keepdims=True))
    else:
        x = x / np.linalg.norm(x)
    for _ in range(config.ns_steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize(
    "config",
    [Muon(weight_decay=0.3), Muon(weight_decay=0.3, ns_steps=3, preconditioning="aol")],
    ids=["frobenius", "aol"],
)
def test_muon_matches_formula(config: Muon) -> None:
    """Nesterov momentum, orthogonalized, scaled to the size of AdamW's update (Liu et al. 2025)."""
    rates = RATES[:3]
    actual = updated(config, drawn(0), rates=rates)
    theta, m = drawn(0)["matrix"].astype(np.float64), np.zeros(())
    for t, rate in enumerate(rates, start=1):
        g = gradients(drawn(0), t)["matrix"].astype(np.float64)
        m = 0.95 * m + 0.05 * g
        ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        direction = 0.2 * np.sqrt(max(5, 11)) * newton_schulz(ahead, config)
        theta = theta - rate * (direction + 0.3 * theta)
    np.testing.assert_allclose(actual["matrix"], theta, rtol=1e-4, atol=1e-5)


def test_muon_treats_layers_independently() -> None:
    """Also for a weight with heads, whose matrix is [inputs, all outputs], and for experts."""
    config, params = Muon(weight_decay=0.1), drawn(0)
    actual = updated(config, params)
    optimizer = make_optimizer(config, {"one": LogicalAxes(inputs=("embed",), outputs=("mlp",))})
    update = jax.jit(optimizer.update)
    layers = [("stacked", (i,)) for i in range(2)] + [
        ("experts", (i, j)) for i in range(2) for j in range(3)
    ]
    for name, layer in layers:
        one = lambda leaf: {"one": jnp.asarray(leaf[layer].reshape(5, -1))}  # noqa: B023, E731
        weights = one(params[name])
        state = optimizer.init(weights)
        for step, rate in enumerate(RATES, start=1):
            grads = one(gradients(params, step)[name])
            directions, state = update(grads, state, weights)
            weights = {"one": weights["one"] - rate * directions["one"]}
        assert_close(actual[name][layer].reshape(5, -1), weights["one"], 1e-5)


def test_other_parameters_use_adam() -> None:
    """With Nesterov's momentum, and without decay."""
    config = Muon(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    rates = RATES[:3]
    actual = updated(config, drawn(0), rates=rates)
    for name in set(SHAPES) - {"matrix", "stacked", "experts"}:
        theta, m, v = drawn(0)[name].astype(np.float64), np.zeros(()), np.zeros(())
        for t, rate in enumerate(rates, start=1):
            g = gradients(drawn(0), t)[name].astype(np.float64)
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            ahead = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)
            theta = theta - rate * ahead / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        np.testing.assert_allclose(actual[name], theta, rtol=2e-5, atol=2e-6, err_msg=name)


def test_output_matrix_uses_adam() -> None:
    """An untied output matrix has the vocabulary among its outputs, so Muon leaves it to Adam."""
    axes = {"output": LogicalAxes(inputs=("embed",), outputs=("vocab",))}
    params = {"output": jnp.ones((5, 7))}
    grads = {"output": jnp.asarray(np.random.RandomState(0).randn(5, 7), jnp.float32)}
    optimizer = make_optimizer(Muon(beta1=0.0, weight_decay=0.0), axes)
    direction, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(direction["output"], np.sign(grads["output"]), rtol=1e-5)


def test_unknown_preconditioning() -> None:
    unknown: Any = "schatten"
    with pytest.raises(ValueError, match=r"optimizer\.preconditioning schatten: is not known"):
        Muon(preconditioning=unknown)

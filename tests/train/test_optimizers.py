from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import assert_close
from tests.train.support import light_compiler as light_compiler
from train.optimizers import OptimizerConfig, make_optimizer, matrices
from transformer.weights import Axes

Tree = dict[str, Any]

AXES = {
    "embedding": Axes(inputs=("vocab",), outputs=("embed",)),
    "positions": Axes(inputs=("positions",), outputs=("embed",)),
    "matrix": Axes(inputs=("embed",), outputs=("mlp",)),
    "stacked": Axes(stack=("layers",), inputs=("embed",), outputs=("heads", "head")),
    "bias": Axes(outputs=("mlp",)),
    "stacked_bias": Axes(stack=("layers",), outputs=("heads", "head")),
    "gain": Axes(outputs=("embed",)),
    "stacked_gain": Axes(stack=("layers",), outputs=("embed",)),
}
SHAPES = {
    "embedding": (7, 5),
    "positions": (3, 5),
    "matrix": (5, 11),
    "stacked": (2, 5, 3, 4),
    "bias": (11,),
    "stacked_bias": (2, 3, 4),
    "gain": (5,),
    "stacked_gain": (2, 5),
}
DECAYED = {"embedding", "positions", "matrix", "stacked"}


def drawn(seed: int) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


def updated(config: OptimizerConfig, rates: list[float], axes: Tree, params: Tree) -> Tree:
    """The parameters after an update for each rate, with gradients that are drawn."""
    optimizer = make_optimizer(config, axes)
    params = {name: jnp.asarray(value) for name, value in params.items()}
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    for step, rate in enumerate(rates):
        grads = {name: jnp.asarray(gradient(name, step)[: len(p)]) for name, p in params.items()}
        directions, state = update(grads, state, params)
        params = {name: params[name] - rate * directions[name] for name in params}
    return params


def gradient(name: str, step: int) -> np.ndarray:
    return drawn(100 + step)[name]


def test_adamw_is_the_formula() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in NumPy, with a rate that changes."""
    config = OptimizerConfig(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    rates = [0.1, 0.03, 0.2, 0.07]
    found = updated(config, rates, AXES, drawn(0))
    for name, theta in drawn(0).items():
        theta, m, v = theta.astype(np.float64), np.zeros(()), np.zeros(())
        for t, rate in enumerate(rates, start=1):
            g = gradient(name, t - 1).astype(np.float64)
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            decay = 0.3 if name in DECAYED else 0.0
            theta = theta - rate * (direction + decay * theta)
        np.testing.assert_allclose(found[name], theta, rtol=2e-5, atol=2e-6, err_msg=name)


def test_what_decays_are_matrices_by_the_names_of_their_axes() -> None:
    assert {name for name, yes in matrices(AXES).items() if yes} == DECAYED
    with_decay = updated(OptimizerConfig(weight_decay=0.5), [0.1], AXES, drawn(0))
    without = updated(OptimizerConfig(weight_decay=0.0), [0.1], AXES, drawn(0))
    for name, start in drawn(0).items():
        taken = 0.1 * 0.5 * start if name in DECAYED else np.zeros_like(start)
        difference = np.asarray(without[name]) - np.asarray(with_decay[name])
        np.testing.assert_allclose(difference, taken, atol=1e-6, err_msg=name)


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Jordan et al. 2024: five steps of X <- a X + (b A + c A A) X with A = X X^T."""
    if len(x) > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_is_the_formula() -> None:
    """Nesterov momentum, orthogonalised, of the size of AdamW's (Liu et al. 2025)."""
    config = OptimizerConfig("muon", weight_decay=0.3)
    rates = [0.1, 0.03, 0.2]
    found = updated(config, rates, AXES, drawn(0))
    theta, m = drawn(0)["matrix"].astype(np.float64), np.zeros(())
    for t, rate in enumerate(rates, start=1):
        g = gradient("matrix", t - 1).astype(np.float64)
        m = 0.95 * m + 0.05 * g
        ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        direction = 0.2 * np.sqrt(max(5, 11)) * newton_schulz(ahead)
        theta = theta - rate * (direction + 0.3 * theta)
    np.testing.assert_allclose(found["matrix"], theta, rtol=1e-4, atol=1e-5)


def test_muon_on_a_stack_is_muon_on_each_layer() -> None:
    """Also of a weight that has heads: its matrix is [inputs, all outputs]."""
    rates = [0.1, 0.2]
    config = OptimizerConfig("muon", weight_decay=0.1)
    stacked = updated(config, rates, AXES, drawn(0))["stacked"]
    flat = Axes(inputs=("embed",), outputs=("mlp",))
    optimizer = make_optimizer(config, {"one": flat})
    update = jax.jit(optimizer.update)
    for layer in range(2):
        params = {"one": jnp.asarray(drawn(0)["stacked"][layer].reshape(5, 12))}
        state = optimizer.init(params)
        for step, rate in enumerate(rates):
            grads = {"one": jnp.asarray(gradient("stacked", step)[layer].reshape(5, 12))}
            directions, state = update(grads, state, params)
            params = {"one": params["one"] - rate * directions["one"]}
        assert_close(stacked[layer].reshape(5, 12), params["one"], 1e-5)


def test_muon_leaves_all_but_the_layers_matrices_to_adam() -> None:
    """With Nesterov's momentum, and without decay."""
    config = OptimizerConfig("muon", beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3)
    rates = [0.1, 0.03, 0.2]
    found = updated(config, rates, AXES, drawn(0))
    for name in set(SHAPES) - {"matrix", "stacked"}:
        theta, m, v = drawn(0)[name].astype(np.float64), np.zeros(()), np.zeros(())
        for t, rate in enumerate(rates, start=1):
            g = gradient(name, t - 1).astype(np.float64)
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            ahead = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * g / (1 - 0.8**t)
            theta = theta - rate * ahead / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
        np.testing.assert_allclose(found[name], theta, rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_output_matrix_is_no_layers_matrix() -> None:
    """An untied one has the vocabulary among its outputs: Muon leaves it to Adam."""
    axes = {"output": Axes(inputs=("embed",), outputs=("vocab",))}
    params = {"output": jnp.ones((5, 7))}
    grads = {"output": jnp.asarray(np.random.RandomState(0).randn(5, 7), jnp.float32)}
    optimizer = make_optimizer(OptimizerConfig("muon", beta1=0.0, weight_decay=0.0), axes)
    direction, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(direction["output"], np.sign(grads["output"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta1": 1.0}, r"optimizer.beta1 1.0: give a share in \[0, 1\)"),
        ({"beta2": -0.1}, "optimizer.beta2 -0.1"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay -1.0: is negative"),
        ({"clip": -1.0}, "optimizer.clip -1.0: is negative"),
    ],
)
def test_settings_that_make_no_optimizer(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)

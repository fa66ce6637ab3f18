from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.optim.support import Array, Layer, assert_like, by_layers, drawn, updated
from tests.train.support import light_compiler as light_compiler
from train.optim.muon import Muon
from transformer.layers.logical_axes import LogicalAxes


def newton_schulz(x: Array, config: Muon) -> Array:
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


def muon(config: Muon) -> Layer:
    """Compute Muon for hidden matrices, and Adam without decay for everything else.

    The update of a matrix is Nesterov's momentum, orthogonalized, and scaled to the size of AdamW's
    (Liu et al. 2025). A weight with heads is the matrix [inputs, all outputs].
    """

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        hidden = name in ("matrix", "stacked", "experts")
        beta = 0.95 if hidden else 0.8
        m = v = np.zeros(())
        for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
            m = beta * m + (1 - beta) * g
            v = 0.9 * v + 0.1 * g**2
            ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
            if hidden:
                matrix = ahead.reshape(len(w), -1)
                direction = 0.2 * np.sqrt(max(matrix.shape)) * newton_schulz(matrix, config)
                direction = direction.reshape(w.shape) + 0.3 * w
            else:
                direction = ahead / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
            w = w - rate * direction
        return w

    return layer


@pytest.mark.parametrize(
    "settings", [{}, {"ns_steps": 3, "preconditioning": "aol"}], ids=["frobenius", "aol"]
)
def test_muon_matches_formula_per_layer(settings: dict[str, Any]) -> None:
    config = Muon(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.3, **settings)
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), muon(config)), 1e-4)


def test_output_matrix_uses_adam() -> None:
    """An untied output matrix has the vocabulary among its outputs, so Muon leaves it to Adam."""
    axes = {"output": LogicalAxes(inputs=("embed",), outputs=("vocab",))}
    params = {"output": jnp.ones((5, 7))}
    grads = {"output": jnp.asarray(np.random.RandomState(0).randn(5, 7), jnp.float32)}
    optimizer = Muon(beta1=0.0, weight_decay=0.0).make(axes)
    direction, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(direction["output"], np.sign(grads["output"]), rtol=1e-5)

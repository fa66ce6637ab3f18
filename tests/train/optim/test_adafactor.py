from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.optim.support import (
    MATRICES,
    Array,
    Layer,
    assert_like,
    by_layers,
    drawn,
    updated,
)
from tests.train.support import light_compiler as light_compiler
from train.optim.adafactor import Adafactor
from transformer.layers.logical_axes import LogicalAxes


def size(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def adafactor(config: Adafactor) -> Layer:
    """Compute Shazeer and Stern 2018, algorithms 4 and 5, with sums over rows and columns."""

    def layer(name: str, w: Array, grads: list[Array], rates: Sequence[float]) -> Array:
        r = c = v = np.zeros(())
        rows = w.shape[0] if w.ndim else 1
        for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
            beta = 1 - t**-0.8
            squares = g**2 + 1e-30
            if name in MATRICES:
                squares = squares.reshape(rows, -1)
                r = beta * r + (1 - beta) * squares.sum(axis=1, keepdims=True)
                c = beta * c + (1 - beta) * squares.sum(axis=0, keepdims=True)
                v = (r @ c / r.sum()).reshape(g.shape)
            else:
                v = beta * v + (1 - beta) * squares
            u = g / np.sqrt(v)
            u = u / max(1, size(u) / config.clip_threshold) if config.clip_threshold else u
            step = rate * (max(1e-3, size(w)) if config.scale_parameter else 1)
            decay = config.weight_decay * w if name in MATRICES else 0
            w = w - step * u - rate * decay
        return w

    return layer


@pytest.mark.parametrize(
    "config",
    [
        Adafactor(),
        Adafactor(scale_parameter=False, weight_decay=0.3),
        Adafactor(clip_threshold=0.5),
        Adafactor(clip_threshold=0.0),
    ],
    ids=["as published", "steps as they are", "clipped", "not clipped"],
)
def test_adafactor_matches_formula_per_layer(config: Adafactor) -> None:
    assert_like(updated(config, drawn(0)), by_layers(drawn(0), adafactor(config)))


def test_zero_weights_are_updated() -> None:
    zeros = {name: np.zeros_like(leaf) for name, leaf in drawn(0).items()}
    result = updated(Adafactor(), zeros)
    assert_like(result, by_layers(zeros, adafactor(Adafactor())), 1e-7)
    assert all(np.abs(leaf).min() > 0 for leaf in result.values())


@pytest.mark.parametrize("column", [0.0, 1e-5])
def test_rows_and_columns_without_gradient(column: float) -> None:
    """An unused row beside a column of (almost) zeros: as optax's, not a matrix of NaN."""
    gradient = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) * 1e-2
    gradient[1] = 0
    gradient[:, 2] *= column
    params = {"w": jnp.full((4, 5), 0.1)}
    ours = Adafactor(scale_parameter=False, clip_threshold=0.0)
    optimizer = ours.make({"w": LogicalAxes((), ("embed",), ("mlp",))})
    theirs = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    grads = {"w": jnp.asarray(gradient)}
    found, expected = (
        np.asarray(jax.jit(each.update)(grads, each.init(params), params)[0]["w"])
        for each in (optimizer, theirs)
    )
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_matrix_state_is_rows_and_columns() -> None:
    axes = {
        "w": LogicalAxes(("layers",), ("embed",), ("heads", "head")),
        "b": LogicalAxes(("layers",), (), ("mlp",)),
    }
    params = {"w": jnp.zeros((3, 11, 5, 7)), "b": jnp.zeros((3, 13))}
    state = jax.eval_shape(Adafactor().make(axes).init, params)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert kept == 3 * (11 + 35) + 3 * 13 + 1  # and the update count

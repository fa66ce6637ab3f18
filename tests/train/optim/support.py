"""Parameters of every kind, random gradients, and updates by an optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.optim.optimizer import Optimizer
from transformer.layers.logical_axes import LogicalAxes

Tree = dict[str, Any]
Array = np.ndarray[Any, Any]

AXES = {
    "embedding": LogicalAxes(inputs=("vocab",), outputs=("embed",)),
    "positions": LogicalAxes(inputs=("positions",), outputs=("embed",)),
    "matrix": LogicalAxes(inputs=("embed",), outputs=("mlp",)),
    "stacked": LogicalAxes(stack=("layers",), inputs=("embed",), outputs=("heads", "head")),
    "experts": LogicalAxes(stack=("layers", "experts"), inputs=("embed",), outputs=("mlp",)),
    "bias": LogicalAxes(outputs=("mlp",)),
    "stacked_bias": LogicalAxes(stack=("layers",), outputs=("heads", "head")),
    "gain": LogicalAxes(outputs=("embed",)),
    "stacked_gain": LogicalAxes(stack=("layers",), outputs=("embed",)),
    "stacked_number": LogicalAxes(stack=("layers",)),
}
SHAPES = {
    "embedding": (7, 5),
    "positions": (3, 5),
    "matrix": (5, 11),
    "stacked": (2, 5, 3, 4),
    "experts": (2, 3, 5, 11),
    "bias": (11,),
    "stacked_bias": (2, 3, 4),
    "gain": (5,),
    "stacked_gain": (2, 5),
    "stacked_number": (2,),
}
MATRICES = {"embedding", "positions", "matrix", "stacked", "experts"}
RATES = (0.1, 0.03, 0.2, 0.07)


def drawn(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tree:
    random = np.random.RandomState(seed)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in shapes.items()}


def gradients(params: Tree, step: int) -> Tree:
    """Return the gradients of update `step`, which counts from 1."""
    return drawn(100 + step, {name: leaf.shape for name, leaf in params.items()})


def updated(
    config: Optimizer, params: Tree, axes: Tree = AXES, rates: Sequence[float] = RATES
) -> Tree:
    """Return the parameters after one update per rate."""
    optimizer = config.make(axes)

    @jax.jit
    def update(grads: Tree, state: Any, params: Tree, rate: float) -> Any:
        directions, state = optimizer.update(grads, state, params)
        return {name: params[name] - rate * directions[name] for name in params}, state

    result: Tree = {name: jnp.asarray(value) for name, value in params.items()}
    state = jax.jit(optimizer.init)(result)
    for step, rate in enumerate(rates, start=1):
        # Drawn in the order of the names in `params`; programs return them sorted.
        result, state = update(gradients(params, step), state, result, rate)
    return result


Layer = Callable[[str, Array, list[Array], Sequence[float]], Array]


def by_layers(
    params: Tree, layer: Layer, axes: Tree = AXES, rates: Sequence[float] = RATES
) -> Tree:
    """Compute the same with a function of (name, weights, gradients, rates) of one layer, in
    float64.
    """
    grads = [gradients(params, step + 1) for step in range(len(rates))]
    actual = {}
    for name, leaf in params.items():
        stack = leaf.shape[: len(axes[name].stack)]
        end = np.zeros(leaf.shape)
        for index in np.ndindex(stack):
            own = [each[name][index].astype(np.float64) for each in grads]
            end[index] = layer(name, leaf[index].astype(np.float64), own, rates)
        actual[name] = end
    return actual


def assert_like(found: Tree, expected: Tree, tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        actual = np.asarray(found[name], np.float64)
        limit = tolerance * max(1.0, np.abs(value).max())
        assert np.abs(actual - value).max() <= limit, name

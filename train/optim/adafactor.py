"""Adafactor (Shazeer and Stern 2018).

optax's takes an array's two longest axes for rows and columns, and a stack of layers for one
matrix. Here the names of the axes tell, and each layer is scaled on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from train.optim.base import Optimizer, add_weight_decay, is_axes, pick_entry

if TYPE_CHECKING:
    import jax
    import optax

    from transformer.layers.logical_axes import LogicalAxes

SQUARE_EPSILON = 1e-30
"""Added to the squares of gradients (the paper's first epsilon)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Gradients over the root of the mean of their squares, which a matrix has by rows and columns.

    Algorithms 4 and 5, without momentum: a few numbers for each row and column are all that is kept
    of a matrix. `relative` steps want a learning rate of about 0.01.
    """

    kind: ClassVar[str] = "adafactor"

    decay_rate: float = 0.8
    """Step t leaves 1 - t^-decay of the mean squares as it is (section 7.2)."""
    clip_threshold: float = 1.0
    """Largest root mean square of a layer's direction; beyond it, it is scaled down (section 6).
    0: no limit."""
    scale_parameter: bool = True
    """Whether directions are multiplied by the root mean square of the weights (section 8)."""
    min_parameter_scale: float = 1e-3
    """The least that counts for the size of weights, so that those at zero move."""
    weight_decay: float = 0.0
    """Each step takes learning rate * weight_decay of a matrix away."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import jax
        import jax.numpy as jnp
        import optax

        def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
            updates = state.updates + 1
            move = functools.partial(
                self.update_parameter, 1 - updates.astype(jnp.float32) ** -self.decay_rate
            )
            trees = (axes, grads, params, state.rows, state.columns)
            moved = jax.tree.map(move, *trees, is_leaf=is_axes)
            return pick_entry(moved, axes, 0), AdafactorState(
                updates, pick_entry(moved, axes, 1), pick_entry(moved, axes, 2)
            )

        factored = optax.GradientTransformation(lambda params: _init(params, axes), update)
        return optax.chain(factored, add_weight_decay(self.weight_decay, axes))

    def update_parameter(
        self,
        decay: jax.Array,
        axes: LogicalAxes,
        gradient: jax.Array,
        weights: jax.Array,
        rows: jax.Array,
        columns: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The direction of a parameter, and its means of squares one step on."""
        import jax
        import jax.numpy as jnp

        squares = jnp.square(gradient) + SQUARE_EPSILON
        if columns is None:
            rows = decay * rows + (1 - decay) * squares
            direction = gradient * jax.lax.rsqrt(rows)
        else:
            squares = squares.reshape(_matrices(gradient, axes))
            rows = decay * rows + (1 - decay) * jnp.mean(squares, axis=-1)
            columns = decay * columns + (1 - decay) * jnp.mean(squares, axis=-2)
            shares = rows / jnp.mean(rows, axis=-1, keepdims=True)
            means = shares[..., :, None] * columns[..., None, :]
            direction = gradient * jax.lax.rsqrt(means).reshape(gradient.shape)
        if self.clip_threshold:
            direction /= jnp.maximum(1, _size(direction, axes) / self.clip_threshold)
        if self.scale_parameter:
            direction *= jnp.maximum(
                self.min_parameter_scale, _size(weights.astype(jnp.float32), axes)
            )
        return direction, rows, columns


class AdafactorState(NamedTuple):
    """Means of squared gradients."""

    updates: jax.Array  # int32, so many made
    rows: Any  # over the columns of matrices [*stack, rows]; of all else, whole
    columns: Any  # over the rows of matrices [*stack, columns]; of all else, None


def _init(params: Any, axes: Any) -> AdafactorState:
    import jax
    import jax.numpy as jnp

    def rows(axes: LogicalAxes, leaf: jax.Array) -> jax.Array:
        return jnp.zeros(_matrices(leaf, axes)[:-1] if axes.is_matrix else leaf.shape)

    def columns(axes: LogicalAxes, leaf: jax.Array) -> jax.Array | None:
        *stack, _, count = _matrices(leaf, axes)
        return jnp.zeros((*stack, count)) if axes.is_matrix else None

    trees = (jax.tree.map(zeros, axes, params, is_leaf=is_axes) for zeros in (rows, columns))
    return AdafactorState(jnp.int32(0), *trees)


def _matrices(leaf: jax.Array, axes: LogicalAxes) -> tuple[int, ...]:
    """The shape [*stack, rows, columns] of a weight's matrices."""
    start, middle = len(axes.stack), len(axes.stack) + len(axes.inputs)
    rows, columns = math.prod(leaf.shape[start:middle]), math.prod(leaf.shape[middle:])
    return (*leaf.shape[:start], rows, columns)


def _size(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """The root mean square of each layer's entries."""
    import jax.numpy as jnp

    layer = tuple(range(len(axes.stack), x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=layer, keepdims=True))

"""Adafactor (Shazeer and Stern 2018): second moments of a matrix as row and column means.

For a matrix, the mean of squared gradients is approximated by the product of its row means and
column means (algorithm 4), so that the state grows with rows + columns instead of rows * columns.
There is no momentum.

optax's implementation takes an array's two longest axes for rows and columns, and a stack of layers
for one matrix. This one goes by logical axes, and treats each layer on its own.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from train.optim.optimizer import Optimizer, add_weight_decay, map_parameters
from transformer.layers.logical_axes import LogicalAxes
from transformer.validation import NonNegativeFloat

SQUARE_EPSILON = 1e-30
"""Added to squared gradients (epsilon_1 of the paper)."""


class AdafactorState(NamedTuple):
    """Means of squared gradients. Field names are part of the checkpoint format."""

    updates: jax.Array  # int32, number of updates made
    rows: Any  # matrices: mean of each row [*stack, rows]; other parameters: the full array
    columns: Any  # matrices: mean of each column [*stack, columns]; other parameters: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (algorithms 4 and 5) without momentum.

    With `scale_parameter`, a learning rate of about 0.01 is usual.
    """

    kind: ClassVar[str] = "adafactor"

    decay_rate: NonNegativeFloat = 0.8
    """Exponent c of the decay 1 - t^-c of the mean squares at step t (section 7.2)."""
    clip_threshold: NonNegativeFloat = 1.0
    """Largest root mean square (RMS) of a layer's update; larger updates are scaled down to it
    (section 6). 0: no limit."""
    scale_parameter: bool = True
    """Multiply each update by the RMS of the layer's weights (section 8)."""
    min_parameter_scale: NonNegativeFloat = 1e-3
    """Lower limit of that RMS, so that weights that are 0 can change (epsilon_2 of the paper)."""
    weight_decay: NonNegativeFloat = 0.0
    """Each step subtracts learning_rate * weight_decay of every matrix."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        def init(params: Any) -> AdafactorState:
            return AdafactorState(jnp.int32(0), *map_parameters(_init_means, axes, params))

        def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
            updates = state.updates + 1
            decay = 1 - updates.astype(jnp.float32) ** -self.decay_rate
            update_one = functools.partial(self._update_parameter, decay)
            directions, rows, columns = map_parameters(
                update_one, axes, grads, params, state.rows, state.columns
            )
            return directions, AdafactorState(updates, rows, columns)

        adafactor = optax.GradientTransformation(init, update)
        return optax.chain(adafactor, add_weight_decay(self.weight_decay, axes))

    def _update_parameter(
        self,
        decay: jax.Array,
        axes: LogicalAxes,
        gradient: jax.Array,
        weights: jax.Array,
        rows: jax.Array,
        columns: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the direction of one parameter, and its new row and column means."""
        squares = jnp.square(gradient) + SQUARE_EPSILON
        if columns is None:
            rows = decay * rows + (1 - decay) * squares
            direction = gradient * jax.lax.rsqrt(rows)
        else:
            squares = squares.reshape(_matrix_shape(gradient, axes))
            rows = decay * rows + (1 - decay) * jnp.mean(squares, axis=-1)
            columns = decay * columns + (1 - decay) * jnp.mean(squares, axis=-2)
            # By a matrix of rank 1 with these row and column means. It is not formed: where both
            # are small their product is 0 in float32, and the direction would not be a number.
            shares = rows / jnp.mean(rows, axis=-1, keepdims=True)
            by_row, by_column = jax.lax.rsqrt(shares), jax.lax.rsqrt(columns)
            direction = gradient.reshape(squares.shape) * by_row[..., :, None]
            direction = (direction * by_column[..., None, :]).reshape(gradient.shape)
        if self.clip_threshold:
            direction /= jnp.maximum(1, _layer_rms(direction, axes) / self.clip_threshold)
        if self.scale_parameter:
            rms = _layer_rms(weights.astype(jnp.float32), axes)
            direction *= jnp.maximum(self.min_parameter_scale, rms)
        return direction, rows, columns


def _init_means(axes: LogicalAxes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the row and column means of one parameter before the first update."""
    if not axes.is_matrix:
        return jnp.zeros(leaf.shape), None
    *stack, rows, columns = _matrix_shape(leaf, axes)
    return jnp.zeros((*stack, rows)), jnp.zeros((*stack, columns))


def _matrix_shape(leaf: jax.Array, axes: LogicalAxes) -> tuple[int, ...]:
    """Return the shape [*stack, rows, columns] of a parameter's matrices."""
    first_row, first_column = len(axes.stack), len(axes.stack) + len(axes.inputs)
    rows = math.prod(leaf.shape[first_row:first_column])
    columns = math.prod(leaf.shape[first_column:])
    return (*leaf.shape[:first_row], rows, columns)


def _layer_rms(x: jax.Array, axes: LogicalAxes) -> jax.Array:
    """Return the root mean square of each layer, with axes of length 1 for broadcasting."""
    layer = tuple(range(len(axes.stack), x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=layer, keepdims=True))

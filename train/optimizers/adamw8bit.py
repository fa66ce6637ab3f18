"""AdamW with moments of 8 bits (Dettmers et al. 2022)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from train.optimizers.base import Optimizer, decayed, is_axes, part

if TYPE_CHECKING:
    import jax
    import optax

    from transformer.weights import Axes


SMALL = 4096
"""Parameters with fewer numbers in a layer have moments of 32 bits: they save nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bit(Optimizer):
    """As AdamW, with 2 bytes a parameter between steps, and a scale for each block and moment."""

    kind: ClassVar[str] = "adamw8bit"

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Each step takes learning rate * weight_decay of a matrix away."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import jax
        import jax.numpy as jnp
        import optax

        def init(params: Any) -> State:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
            mean, square = (stored(zeros, axes, signed=signed) for signed in (True, False))
            return State(jnp.int32(0), mean, square)

        def update(grads: Any, state: State, params: Any) -> tuple[Any, State]:
            updates = state.updates + 1
            b1, b2 = self.beta1, self.beta2
            m, v = loaded(state.mean, axes, signed=True), loaded(state.square, axes, signed=False)
            m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
            v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)
            n = updates.astype(jnp.float32)
            directions = jax.tree.map(
                lambda m, v: m / (1 - b1**n) / (jnp.sqrt(v / (1 - b2**n)) + self.epsilon), m, v
            )
            moments = stored(m, axes, signed=True), stored(v, axes, signed=False)
            return directions, State(updates, *moments)

        adam = optax.GradientTransformation(init, update)
        return optax.chain(adam, decayed(self.weight_decay, axes))


class Moment(NamedTuple):
    """A tree like that of the parameters, as it is stored."""

    values: Any  # uint8 codes, or float32 where a parameter is small
    scales: Any  # float32 for each block, or None


class State(NamedTuple):
    """The moments between steps."""

    updates: jax.Array  # int32, so many made
    mean: Moment
    square: Moment


def stored(tree: Any, axes: Any, *, signed: bool) -> Moment:
    """A moment in 8 bits."""
    import jax

    from train.optimizers.eight_bits import quantise

    def store(axes: Axes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        stack = len(axes.stack)
        small = math.prod(leaf.shape[stack:]) < SMALL
        return (leaf, None) if small else quantise(leaf, stack, signed=signed)

    pairs = jax.tree.map(store, axes, tree, is_leaf=is_axes)
    return Moment(*(part(pairs, axes, i) for i in range(2)))


def loaded(moment: Moment, axes: Any, *, signed: bool) -> Any:
    """A moment in 32 bits."""
    import jax

    from train.optimizers.eight_bits import dequantise

    def load(axes: Axes, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return values
        return dequantise(values, scales, len(axes.stack), signed=signed)

    return jax.tree.map(load, axes, moment.values, moment.scales, is_leaf=is_axes)

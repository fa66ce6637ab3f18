"""AdamW with moments of 8 bits (Dettmers et al. 2022)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from train.optimizers.base import Optimizer, add_weight_decay, is_axes, pick_entry

if TYPE_CHECKING:
    import jax
    import optax

    from transformer.weights import LogicalAxes


MIN_QUANTIZED_SIZE = 4096
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

        def init(params: Any) -> AdamW8bitState:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
            mean, square = (store_moment(zeros, axes, signed=signed) for signed in (True, False))
            return AdamW8bitState(jnp.int32(0), mean, square)

        def update(grads: Any, state: AdamW8bitState, params: Any) -> tuple[Any, AdamW8bitState]:
            updates = state.updates + 1
            b1, b2 = self.beta1, self.beta2
            m, v = (
                load_moment(state.mean, axes, signed=True),
                load_moment(state.square, axes, signed=False),
            )
            m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
            v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)
            n = updates.astype(jnp.float32)
            directions = jax.tree.map(
                lambda m, v: m / (1 - b1**n) / (jnp.sqrt(v / (1 - b2**n)) + self.epsilon), m, v
            )
            moments = store_moment(m, axes, signed=True), store_moment(v, axes, signed=False)
            return directions, AdamW8bitState(updates, *moments)

        adam = optax.GradientTransformation(init, update)
        return optax.chain(adam, add_weight_decay(self.weight_decay, axes))


class StoredMoment(NamedTuple):
    """A tree like that of the parameters, as it is stored."""

    values: Any  # uint8 codes, or float32 where a parameter is small
    scales: Any  # float32 for each block, or None


class AdamW8bitState(NamedTuple):
    """The moments between steps."""

    updates: jax.Array  # int32, so many made
    mean: StoredMoment
    square: StoredMoment


def store_moment(tree: Any, axes: Any, *, signed: bool) -> StoredMoment:
    """A moment in 8 bits."""
    import jax

    from train.optimizers.eight_bits import quantize

    def store(axes: LogicalAxes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        stack = len(axes.stack)
        small = math.prod(leaf.shape[stack:]) < MIN_QUANTIZED_SIZE
        return (leaf, None) if small else quantize(leaf, stack, signed=signed)

    pairs = jax.tree.map(store, axes, tree, is_leaf=is_axes)
    return StoredMoment(*(pick_entry(pairs, axes, i) for i in range(2)))


def load_moment(moment: StoredMoment, axes: Any, *, signed: bool) -> Any:
    """A moment in 32 bits."""
    import jax

    from train.optimizers.eight_bits import dequantize

    def load(axes: LogicalAxes, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return values
        return dequantize(values, scales, len(axes.stack), signed=signed)

    return jax.tree.map(load, axes, moment.values, moment.scales, is_leaf=is_axes)

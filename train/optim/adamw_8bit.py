"""AdamW with moments stored in 8 bits (Dettmers et al. 2022)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from train.optim.optimizer import Optimizer, add_weight_decay, is_axes, pick_entry
from transformer.validation import Fraction, NonNegativeFloat

if TYPE_CHECKING:
    import jax
    import optax

    from transformer.layers.logical_axes import LogicalAxes

MIN_QUANTIZED_SIZE = 4096
"""Fewest numbers of a layer whose moments are quantized. Smaller parameters (biases, gains) keep
float32 moments: they would save no memory worth the error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW8bit(Optimizer):
    """AdamW with 2 bytes of moments for each parameter, and two scales for each block of 256.

    Moments are float32 during the update, and quantized between steps.
    """

    kind: ClassVar[str] = "adamw8bit"

    beta1: Fraction = 0.9
    """Decay rate of the mean of the gradients."""
    beta2: Fraction = 0.95
    """Decay rate of the mean of their squares."""
    epsilon: NonNegativeFloat = 1e-8
    """Added to the root in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix."""

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
            m = load_moment(state.mean, axes, signed=True)
            v = load_moment(state.square, axes, signed=False)
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
    """One moment of all parameters between steps. Field names are part of the checkpoint format."""

    values: Any  # tree of uint8 codes; float32 for small parameters
    scales: Any  # tree of float32 [..., blocks]; None for small parameters


class AdamW8bitState(NamedTuple):
    """Optimizer state. Field names are part of the checkpoint format."""

    updates: jax.Array  # int32, number of updates made
    mean: StoredMoment  # of the gradients, signed
    square: StoredMoment  # of the squared gradients, unsigned


def store_moment(tree: Any, axes: Any, *, signed: bool) -> StoredMoment:
    """Quantize a moment."""
    import jax

    from train.optim.quantization import quantize

    def store(axes: LogicalAxes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        num_stack_axes = len(axes.stack)
        if math.prod(leaf.shape[num_stack_axes:]) < MIN_QUANTIZED_SIZE:
            return leaf, None
        return quantize(leaf, num_stack_axes, signed=signed)

    pairs = jax.tree.map(store, axes, tree, is_leaf=is_axes)
    return StoredMoment(*(pick_entry(pairs, axes, i) for i in range(2)))


def load_moment(moment: StoredMoment, axes: Any, *, signed: bool) -> Any:
    """Return a moment in float32, with the structure of the parameters."""
    import jax

    from train.optim.quantization import dequantize

    def load(axes: LogicalAxes, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return values
        return dequantize(values, scales, len(axes.stack), signed=signed)

    return jax.tree.map(load, axes, moment.values, moment.scales, is_leaf=is_axes)

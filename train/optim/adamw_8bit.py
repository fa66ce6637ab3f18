"""AdamW with moments stored in 8 bits (Dettmers et al. 2022), and their quantization.

Block-wise quantization (section 2): a block of 256 numbers is divided by its largest magnitude.
Each quotient is stored as the number of the nearest of 256 code values. The codes are dense near
zero (a dynamic data type): decade i of seven, from 1e-6 to 1, has 2^i values spread evenly over
[0.1, 1) * 10^(i - 6); 0 and 1 have codes too. Signed codes have each value with either sign (but no
-1). Unsigned codes, for numbers that are never negative, have twice as many values in each decade.

One departure from the paper: an unsigned number above 0 never rounds to 0. A second moment that
did, beside a first moment that did not, would make Adam divide by epsilon alone: updates would be
hundreds of times too large, where gradients stop after a step that was small for its block.

Codes are computed by arithmetic: table look-ups are slow on every kind of hardware.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from train.optim.optimizer import Optimizer, add_weight_decay, map_parameters
from transformer.layers.logical_axes import LogicalAxes
from transformer.validation import Fraction, NonNegativeFloat

MIN_QUANTIZED_SIZE = 4096
"""Fewest numbers of a layer whose moments are quantized. Smaller parameters (biases, gains) keep
float32 moments: they would save no memory worth the error."""

BLOCK_SIZE = 256
"""Numbers that share a scale."""

ZERO_CODE = 127
"""Signed code of 0. Code 127 + j is value j, code 127 - j its negative."""


class StoredMoment(NamedTuple):
    """One moment of all parameters between steps. Field names are part of the checkpoint format."""

    values: Any  # tree of uint8 codes; float32 for small parameters
    scales: Any  # tree of float32 [..., blocks]; None for small parameters


class AdamW8bitState(NamedTuple):
    """Optimizer state. Field names are part of the checkpoint format."""

    updates: jax.Array  # int32, number of updates made
    mean: StoredMoment  # of the gradients, signed
    square: StoredMoment  # of the squared gradients, unsigned


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


def store_moment(tree: Any, axes: Any, *, signed: bool) -> StoredMoment:
    """Quantize a moment."""

    def store(axes: LogicalAxes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        num_stack_axes = len(axes.stack)
        if math.prod(leaf.shape[num_stack_axes:]) < MIN_QUANTIZED_SIZE:
            return leaf, None
        return quantize(leaf, num_stack_axes, signed=signed)

    return StoredMoment(*map_parameters(store, axes, tree))


def load_moment(moment: StoredMoment, axes: Any, *, signed: bool) -> Any:
    """Return a moment in float32, with the structure of the parameters."""

    def load(axes: LogicalAxes, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return values
        return dequantize(values, scales, len(axes.stack), signed=signed)

    return jax.tree.map(load, axes, moment.values, moment.scales)


def quantize(
    x: jax.Array,  # [*stack, ...] float32
    num_stack_axes: int,
    *,
    signed: bool,
) -> tuple[jax.Array, jax.Array]:  # uint8 with the shape of x; float32 [..., blocks]
    """Return codes and scales. Blocks run along the memory of one layer; the last may be short."""
    blocks = _split_into_blocks(x, num_stack_axes)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    # A block of zeros has scale 0.
    codes = nearest_code(blocks / jnp.where(scales > 0, scales, 1)[..., None], signed=signed)
    return _join_blocks(codes, x.shape, num_stack_axes), scales


def dequantize(
    codes: jax.Array,  # [*stack, ...] uint8
    scales: jax.Array,  # [..., blocks] float32
    num_stack_axes: int,
    *,
    signed: bool,
) -> jax.Array:  # [*stack, ...] float32
    """Return the numbers.

    The error is at most half the distance of neighboring values, except for unsigned numbers that
    were kept from becoming 0.
    """
    blocks = code_values(_split_into_blocks(codes, num_stack_axes), signed=signed)
    return _join_blocks(blocks * scales[..., None], codes.shape, num_stack_axes)


def nearest_code(
    x: jax.Array,  # [...] in [-1, 1], unsigned in [0, 1]
    *,
    signed: bool,
) -> jax.Array:  # [...] uint8
    """Return the code of the nearest value. Unsigned numbers above 0 never get the code of 0."""
    first = 1 if signed else 2  # values in decade 0
    size, count, scale = jnp.abs(x), jnp.full_like(x, first), jnp.full_like(x, 1e6)
    for decade in range(1, 7):
        n = first * 2.0**decade
        # A decade begins halfway between its first value and the last value of the decade below,
        # which has n / 2 values.
        inside = size > 10.0 ** (decade - 7) * (1 + 1.8 / n)
        count, scale = jnp.where(inside, n, count), jnp.where(inside, 10.0 ** (6 - decade), scale)
    place = jnp.floor((size * scale - 0.1) / 0.9 * count)
    # Decades below have first * (1 + 2 + ... ) = count - first values, and code 0 is the value 0.
    number = 1 + count - first + jnp.clip(place, 0, count - 1)
    to_one = 1 - 0.225 / (first * 64)  # halfway between the last value and 1
    if not signed:
        number = jnp.where(size > 0, number, 0)
        return jnp.where(size > to_one, 255, number).astype(jnp.uint8)
    number = jnp.where(size < 1e-6 * (0.1 + 0.45 / first) / 2, 0, number)
    number = jnp.where(x > to_one, 128, number)
    return (ZERO_CODE + jnp.sign(x) * number).astype(jnp.uint8)


def code_values(
    codes: jax.Array,  # [...] uint8
    *,
    signed: bool,
) -> jax.Array:  # [...] float32
    """Return the value of each code, in [-1, 1]."""
    first = 1 if signed else 2  # values in decade 0
    number = codes.astype(jnp.float32) - (ZERO_CODE if signed else 0)
    size = jnp.abs(number)
    count, scale = jnp.full_like(size, first), jnp.full_like(size, 1e-6)
    for decade in range(1, 7):
        n = first * 2.0**decade
        inside = size > n - first
        count, scale = jnp.where(inside, n, count), jnp.where(inside, 10.0 ** (decade - 6), scale)
    place = size - (1 + count - first)
    value = scale * (0.1 + 0.9 * (place + 0.5) / count)
    value = jnp.where(size == 128 * first - first + 1, 1, value)
    return jnp.sign(number) * value


def _split_into_blocks(
    x: jax.Array,  # [*stack, ...]
    num_stack_axes: int,
) -> jax.Array:  # [..., blocks, 256]
    """Reshape the fewest last axes that hold whole blocks, so that other axes stay sharded.

    A layer without a whole number of blocks is flattened and padded with zeros.
    """
    for axis in reversed(range(num_stack_axes, x.ndim)):
        if math.prod(x.shape[axis:]) % BLOCK_SIZE == 0:
            return x.reshape(*x.shape[:axis], -1, BLOCK_SIZE)
    stack = x.shape[:num_stack_axes]
    flat = x.reshape(*stack, -1)
    padding = [(0, 0)] * num_stack_axes + [(0, -flat.shape[-1] % BLOCK_SIZE)]
    return jnp.pad(flat, padding).reshape(*stack, -1, BLOCK_SIZE)


def _join_blocks(blocks: jax.Array, shape: tuple[int, ...], num_stack_axes: int) -> jax.Array:
    """Undo `_split_into_blocks`: return the array of this shape, without padding."""
    if blocks.size == math.prod(shape):
        return blocks.reshape(shape)
    flat = blocks.reshape(*shape[:num_stack_axes], -1)
    return flat[..., : math.prod(shape[num_stack_axes:])].reshape(shape)

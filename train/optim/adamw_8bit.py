"""Numbers of 8 bits, in blocks that share a scale (Dettmers et al. 2022, section 2).

A block of 256 numbers is divided by its largest magnitude, and each is stored as the number of the
nearest of 256 codes. The codes are dense near zero: seven decades from 1e-6 to 1, the i-th with
2^i values spread evenly over [0.1, 1) * 10^(i - 6), then 0 and 1. Signed ones have each value with
either sign (but no -1); those of numbers that are never negative have twice as many in each decade.

One departure: of numbers that are never negative none but 0 becomes 0. A second moment that did,
beside a first moment that did not, would be divided by next to nothing: directions hundreds of
times too large, where a gradient stops after a step that was small for its block.

AdamW with moments of 8 bits (Dettmers et al. 2022).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from train.optim.base import Optimizer, add_weight_decay, is_axes, pick_entry

if TYPE_CHECKING:
    import jax
    import optax

    from transformer.layers.logical_axes import LogicalAxes

BLOCK_SIZE = 256
"""Numbers that share a scale."""


ZERO_CODE = 127
"""The code of 0 among the signed ones."""


def quantize(
    x: jax.Array,  # [*stack, ...] float32
    num_stack_axes: int,  # axes of repetition
    *,
    signed: bool,
) -> tuple[jax.Array, jax.Array]:  # uint8 like x, float32 [..., blocks]
    """Codes and scales. Blocks lie along the memory of one layer, the last one may be short."""
    blocks = _cut(x, num_stack_axes)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    codes = nearest_code(blocks / jnp.where(scales > 0, scales, 1)[..., None], signed=signed)
    return _joined(codes, x.shape, num_stack_axes), scales


def dequantize(
    codes: jax.Array,  # [*stack, ...] uint8
    scales: jax.Array,  # [..., blocks] float32
    num_stack_axes: int,
    *,
    signed: bool,
) -> jax.Array:  # [*stack, ...] float32
    """The numbers again, each within half the distance of two codes, tiny squares apart."""
    blocks = code_values(_cut(codes, num_stack_axes), signed=signed) * scales[..., None]
    return _joined(blocks, codes.shape, num_stack_axes)


def nearest_code(
    x: jax.Array,  # [...] in [-1, 1], or in [0, 1]
    *,
    signed: bool,
) -> jax.Array:  # [...] uint8
    """The code of the nearest value, unsigned never of 0 but for 0 itself.

    By arithmetic, for look-ups are slow on every hardware.
    """
    first = 1 if signed else 2
    size, count, scale = jnp.abs(x), jnp.full_like(x, first), jnp.full_like(x, 1e6)
    for decade in range(1, 7):
        n = first * 2.0**decade
        # Halfway from the last value of the decade before, with n / 2 values, to the first here.
        inside = size > 10.0 ** (decade - 7) * (1 + 1.8 / n)
        count, scale = jnp.where(inside, n, count), jnp.where(inside, 10.0 ** (6 - decade), scale)
    place = jnp.floor((size * scale - 0.1) / 0.9 * count)
    number = 1 + count - first + jnp.clip(place, 0, count - 1)
    largest = 1 - 0.225 / (first * 64)
    if not signed:
        number = jnp.where(size > 0, number, 0)
        return jnp.where(size > largest, 255, number).astype(jnp.uint8)
    number = jnp.where(size < 1e-6 * (0.1 + 0.45 / first) / 2, 0, number)
    number = jnp.where(x > largest, 128, number)
    return (ZERO_CODE + jnp.sign(x) * number).astype(jnp.uint8)


def code_values(
    codes: jax.Array,  # [...] uint8
    *,
    signed: bool,
) -> jax.Array:  # [...] float32
    """What the codes stand for."""
    first = 1 if signed else 2
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


def _cut(x: jax.Array, stack: int) -> jax.Array:  # [*stack, ...] -> [..., blocks, 256]
    """Splits the fewest last axes that hold whole blocks: the others stay spread as they are.

    A layer that holds no whole number of blocks is filled up with zeros.
    """
    for axis in reversed(range(stack, x.ndim)):
        if math.prod(x.shape[axis:]) % BLOCK_SIZE == 0:
            return x.reshape(*x.shape[:axis], -1, BLOCK_SIZE)
    flat = x.reshape(*x.shape[:stack], -1)
    padding = [(0, 0)] * stack + [(0, -flat.shape[-1] % BLOCK_SIZE)]
    return jnp.pad(flat, padding).reshape(*x.shape[:stack], -1, BLOCK_SIZE)


def _joined(blocks: jax.Array, shape: tuple[int, ...], stack: int) -> jax.Array:
    """What `_cut` was given."""
    if blocks.size == math.prod(shape):
        return blocks.reshape(shape)
    flat = blocks.reshape(*shape[:stack], -1)
    return flat[..., : math.prod(shape[stack:])].reshape(shape)


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

    pass  # DROPPED

    def store(axes: LogicalAxes, leaf: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        stack = len(axes.stack)
        small = math.prod(leaf.shape[stack:]) < MIN_QUANTIZED_SIZE
        return (leaf, None) if small else quantize(leaf, stack, signed=signed)

    pairs = jax.tree.map(store, axes, tree, is_leaf=is_axes)
    return StoredMoment(*(pick_entry(pairs, axes, i) for i in range(2)))


def load_moment(moment: StoredMoment, axes: Any, *, signed: bool) -> Any:
    """A moment in 32 bits."""
    import jax

    pass  # DROPPED

    def load(axes: LogicalAxes, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return values
        return dequantize(values, scales, len(axes.stack), signed=signed)

    return jax.tree.map(load, axes, moment.values, moment.scales, is_leaf=is_axes)

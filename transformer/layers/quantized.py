"""Matrices in 8 or 4 bits: rounding, products, and the formats of published packed weights.

| format | codes | scales | zeros | value of a code c |
| --- | --- | --- | --- | --- |
| int8 | int8 | float, one of each output | none | c s |
| int4 | two in a uint8 | float, by group of inputs | uint8 | (c - z) s |
| GPTQ, AWQ | as int8 or int4 | float, by group | integers | (c - z) s |
| MXFP4 (OCP) | two in a uint8 | uint8 exponents e, by group | none | FP4[c] 2^(e - 127) |

The dtypes of the arrays tell the formats apart, so that a checkpoint needs no other record of them.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Integer

from transformer.layers.logical_axes import LogicalAxes

FP4_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
"""Value of each code of FP4: a sign, two bits of exponent and one of mantissa (E2M1)."""

GROUP_AXIS = "quantization_group"
"""Logical axis of the groups of inputs that share a scale. No mesh axis splits it."""

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""Function of x and a matrix that is linear in x."""


class QuantizedWeight(struct.PyTreeNode):
    """A matrix of 8-bit or 4-bit codes that takes the place of an array in a parameter tree.

    Products multiply by the dequantized matrix of one layer, or by its codes and then by the
    scales. The weight is not trained: its gradient is zero. Of two codes in a byte, the low bits
    are of the even input. All arrays have the stack axes of the matrix, so that a scan over layers
    slices them alike.
    """

    # Arrays, or what describes them in trees of shapes, axes and shardings.
    codes: Any  # [*stack, inputs, *outputs] int8; [*stack, inputs / 2, *outputs] uint8
    scales: Any  # [*stack, groups, *outputs]
    zeros: Any  # [*stack, groups, *outputs] integers, the codes of 0; None: 0
    group_of_input: Any  # [*stack, inputs] int32; None: groups lie side by side
    inputs: tuple[int, ...] = struct.field(pytree_node=False)  # sizes of the input axes
    num_outputs: int = struct.field(pytree_node=False)  # number of output axes
    dtype: str = struct.field(pytree_node=False)  # of the matrix that it stands for

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix: stack, inputs and outputs."""
        axis = self.input_axis
        shape: tuple[int, ...] = self.codes.shape
        return (*shape[:axis], *self.inputs, *shape[axis + 1 :])

    @property
    def input_axis(self) -> int:
        """Axis of the inputs in `codes`, and of the groups in `scales`."""
        return int(self.codes.ndim) - 1 - self.num_outputs

    @property
    def has_channel_scales(self) -> bool:
        """True if an output has one scale and no zero point."""
        is_plain = self.codes.dtype == jnp.int8 and self.zeros is None
        return is_plain and self.scales.shape[self.input_axis] == 1

    def astype(self, dtype: Any) -> "QuantizedWeight":
        """Return the weight as one that stands for a matrix of another dtype."""
        return self.replace(dtype=jnp.dtype(dtype).name)

    def integers(self) -> Integer[Array, "..."]:  # [*stack, inputs, *outputs]
        """Return one code for each entry."""
        if self.codes.dtype != jnp.uint8:
            return self.codes
        axis, shape = self.input_axis, self.codes.shape
        shifts = jnp.array([0, 4], jnp.uint8)
        shifts = shifts.reshape(*(1,) * (axis + 1), 2, *(1,) * self.num_outputs)
        pairs = jnp.expand_dims(self.codes, axis + 1) >> shifts & 15
        return pairs.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])

    def dequantize(self) -> Float[Array, "..."]:  # [*stack, *inputs, *outputs]
        """Return the matrix, computed in float32."""
        codes, scales, zeros = self.integers(), self.scales, self.zeros
        axis, shape = self.input_axis, codes.shape
        if self.group_of_input is None:
            groups = scales.shape[axis]
            codes = codes.reshape(*shape[:axis], groups, -1, *shape[axis + 1 :])
            scales = jnp.expand_dims(scales, axis + 1)
            zeros = None if zeros is None else jnp.expand_dims(zeros, axis + 1)
        else:
            ones = (1,) * self.num_outputs
            index = self.group_of_input.reshape(*self.group_of_input.shape, *ones)
            scales = jnp.take_along_axis(scales, index, axis)
            zeros = None if zeros is None else jnp.take_along_axis(zeros, index, axis)
        if scales.dtype == jnp.uint8:
            # The exponent field of a float32, exactly. e = 0 gives 0, in place of 2^-127.
            bits = scales.astype(jnp.uint32) << 23
            scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
            values = jnp.array(FP4_VALUES, jnp.float32)[codes]
        else:
            values = codes.astype(jnp.float32)
            values = values if zeros is None else values - zeros.astype(jnp.float32)
        matrix = values * scales.astype(jnp.float32)
        return matrix.reshape(self.shape).astype(self.dtype)

    def code_matrix(self) -> Float[Array, "..."]:  # [*stack, *inputs, *outputs]
        """Return the codes of a weight with `has_channel_scales`, in its dtype."""
        return self.codes.reshape(self.shape).astype(self.dtype)


def multiply_dequantized(product: Product, x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Return the product of x and the dequantized matrix.

    The backward pass dequantizes again: what is saved for it are the codes.
    """
    return jax.checkpoint(lambda x, weight: product(x, weight.dequantize()))(x, weight)


def multiply_codes(product: Product, x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Return the product with a matrix of codes that `has_channel_scales`, in float32.

    The scales multiply the result, which has fewer entries than the matrix.
    """
    y = jax.checkpoint(lambda x, weight: product(x, weight.code_matrix()))(x, weight)
    outputs = weight.scales.shape[1:]
    return y * weight.scales.reshape(*(1,) * (y.ndim - len(outputs)), *outputs)


def order_after(weight: QuantizedWeight, x: jax.Array) -> QuantizedWeight:
    """Return the weight with codes that XLA cannot read before x is computed.

    XLA's CPU compiler otherwise dequantizes the matrices of all layers before the first layer
    runs, and has no optimization barriers. The codes are the same, unless activations are NaN. On
    a mesh of accelerators each product would wait for the one device that has the entry of x.
    """
    nan = jnp.isnan(x[(0,) * x.ndim]).astype(weight.codes.dtype)
    return weight.replace(codes=weight.codes ^ nan)


def quantize_weight(
    weight: Float[Array, "..."],  # [*stack, *inputs, *outputs]
    axes: LogicalAxes,
    *,
    bits: int,
    group_size: int = 64,
) -> QuantizedWeight:
    """Round a matrix to the nearest codes.

    8 bits: the largest magnitude of an output becomes 127. 4 bits: the range of each group of
    `group_size` inputs, with 0 in it, is divided into 15 steps, and 0 stays 0.

    Raises:
      ValueError: The group size does not divide the inputs, or they cannot be packed in pairs.
    """
    stack, num_inputs = len(axes.stack), len(axes.inputs)
    inputs = weight.shape[stack : stack + num_inputs]
    lead, outputs = weight.shape[:stack], weight.shape[stack + num_inputs :]
    rows = math.prod(inputs)
    values = weight.astype(jnp.float32).reshape(*lead, rows, *outputs)
    dtype = jnp.dtype(weight.dtype).name
    if bits == 8:
        scales = jnp.max(jnp.abs(values), axis=stack, keepdims=True) / 127
        codes = jnp.round(values / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
        return QuantizedWeight(codes, scales, None, None, inputs, len(outputs), dtype)
    if rows % group_size or group_size % 2:
        raise ValueError(
            f"group_size {group_size}: does not divide the {rows} inputs of the matrix into groups "
            "of an even size; give a divisor"
        )
    grouped = values.reshape(*lead, rows // group_size, group_size, *outputs)
    low = jnp.minimum(jnp.min(grouped, axis=stack + 1), 0)
    high = jnp.maximum(jnp.max(grouped, axis=stack + 1), 0)
    scales = round_up_to_float16((high - low) / 15)
    steps = jnp.where(scales > 0, scales, 1).astype(jnp.float32)
    zeros = jnp.round(-low / steps)
    codes = jnp.round(grouped / jnp.expand_dims(steps, stack + 1))
    codes = jnp.clip(codes + jnp.expand_dims(zeros, stack + 1), 0, 15).astype(jnp.uint8)
    pairs = codes.reshape(*lead, rows // 2, 2, *outputs)
    low_bits, high_bits = jnp.split(pairs, 2, axis=stack + 1)
    packed = jnp.squeeze(low_bits | high_bits << 4, axis=stack + 1)
    return QuantizedWeight(
        packed, scales, zeros.astype(jnp.uint8), None, inputs, len(outputs), dtype
    )


def round_up_to_float16(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the least float16 that is at least as large: rounded down, a scale would clip."""
    rounded = values.astype(jnp.float16)
    above = jnp.nextafter(rounded, jnp.array(jnp.inf, jnp.float16))
    return jnp.where(rounded.astype(jnp.float32) < values, above, rounded)


def dequantize_weight(weight: Any) -> Any:
    """Return a `QuantizedWeight` as a matrix, and any other weight as it is."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def quantized_axes(weight: QuantizedWeight, axes: LogicalAxes) -> QuantizedWeight:
    """Return the axes of the arrays of a weight, from those of its matrix.

    The inputs are one axis, split as the first of them is: it varies slowest.
    """
    by_group = LogicalAxes(axes.stack, (GROUP_AXIS,), axes.outputs)
    return weight.replace(
        codes=LogicalAxes(axes.stack, axes.inputs[:1], axes.outputs),
        scales=by_group,
        zeros=None if weight.zeros is None else by_group,
        group_of_input=None
        if weight.group_of_input is None
        else LogicalAxes(axes.stack, outputs=(GROUP_AXIS,)),
    )

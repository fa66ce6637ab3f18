"""Einsum with 16-bit operands and float32 sums, results and gradients.

The gradient through a softmax is a difference, P (dP - sum over keys of P dP), which may cancel
although dP is large: dP must not be rounded to 16 bits before the difference is taken. Operands
stay 16-bit, which is what makes the product fast on an accelerator.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

DTypeLike = Any
"""Anything that `jnp.dtype` accepts."""


def precise_einsum(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    operand_dtype: DTypeLike,
    result_dtype: DTypeLike,
) -> jax.Array:
    """Return einsum(spec, a, b) in `result_dtype`, with a and b rounded to `operand_dtype`.

    a and b may be wider than `operand_dtype`. Their gradients then have their dtype: the result's
    gradient is rounded to `operand_dtype`, the float32 sums are not.

    Args:
      spec: Einsum of two operands; each letter occurs in at least two of its three terms.
      a: First operand.
      b: Second operand.
      operand_dtype: Dtype that the operands are rounded to.
      result_dtype: Dtype of sums and result.
    """
    dtypes = {jnp.dtype(dtype) for dtype in (a.dtype, b.dtype, operand_dtype, result_dtype)}
    if len(dtypes) == 1:  # nothing to round; einsum also has a JVP, which a custom VJP lacks
        return jnp.einsum(spec, a, b)
    # By name, so that one dtype in its several forms is one static argument of `custom_vjp`.
    return _contract(spec, jnp.dtype(operand_dtype).name, jnp.dtype(result_dtype).name, a, b)


def accumulation_dtype(operand_dtype: DTypeLike, softmax_dtype: DTypeLike) -> Any:
    """Return the dtype of sums: the wider of the operands' and the softmax's."""
    return jnp.promote_types(operand_dtype, softmax_dtype)


def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round x to another dtype's precision; the result keeps x's dtype.

    By `reduce_precision`: XLA removes a conversion to a narrow dtype and back
    (`xla_allow_excess_precision` is on by default).
    """
    info = jnp.finfo(dtype)
    if info.bits >= jnp.finfo(x.dtype).bits:
        return x
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def split_high_low(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Split x into (high, low) in `dtype`, with x = high + low to twice the precision.

    low is None if `dtype` is not narrower than x. Worth storing where high is a result that is
    saved anyway: low adds half of what x would take.
    """
    high = round_to_dtype(x, dtype)
    # The difference is exact in the dtype of x. Only the cast rounds: both have twice the digits.
    low = None if high is x else (x - high).astype(dtype)
    return high.astype(dtype), low


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(spec: str, operands: str, dtype: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _einsum(spec, a.astype(operands), b.astype(operands), dtype)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return einsum(spec, a, b) in `dtype`, with operands widened on CPU.

    XLA's CPU compiler computes these products in float32 anyway, but fails for some shapes given
    16-bit operands: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
    """

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=dtype)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        sums = jnp.promote_types(jnp.float32, dtype)
        return jnp.einsum(spec, a.astype(sums), b.astype(sums)).astype(dtype)

    # Selected at lowering: the program may be compiled for hardware that is not attached.
    result: jax.Array = jax.lax.platform_dependent(a, b, cpu=widened, default=narrow)
    return result


def _forward(spec: str, operands: str, dtype: str, a: jax.Array, b: jax.Array) -> Any:
    # Empty arrays carry shapes and dtypes of the gradients: residuals must be arrays.
    templates = jnp.zeros((0, *a.shape), a.dtype), jnp.zeros((0, *b.shape), b.dtype)
    rounded = a.astype(operands), b.astype(operands)
    return _contract(spec, operands, dtype, a, b), (rounded, templates)


def _backward(spec: str, operands: str, dtype: str, residuals: Any, cotangent: jax.Array) -> Any:
    (a, b), (template_a, template_b) = residuals
    inputs, out = spec.split("->")
    axes_a, axes_b = inputs.split(",")
    # Rounded like an operand, for a product of 16-bit numbers; its sums keep the dtype of a and b.
    narrow = cotangent.astype(operands)
    da = _einsum(f"{out},{axes_b}->{axes_a}", narrow, b, template_a.dtype)
    db = _einsum(f"{axes_a},{out}->{axes_b}", a, narrow, template_b.dtype)
    da = _sum_broadcast_axes(da, template_a.shape[1:])
    db = _sum_broadcast_axes(db, template_b.shape[1:])
    return da, db


def _sum_broadcast_axes(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sum a gradient over axes of length 1 that einsum has broadcast."""
    axes = [axis for axis, size in enumerate(shape) if x.shape[axis] != size]
    return x.sum(axes, keepdims=True) if axes else x


_contract.defvjp(_forward, _backward)

"""Products of 16-bit arrays with sums, results and gradients in float32: each rounded once.

A gradient through a softmax is a difference, P (dP - sum over keys of P dP), which may cancel to
nothing where dP itself is large. So dP must not be rounded to 16 bits before the difference is
taken. The operands of a product stay narrow, as that is what makes it fast on an accelerator.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

DTypeLike = Any
"""What `jnp.dtype` takes."""


def precise_einsum(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    operand_dtype: DTypeLike,
    result_dtype: DTypeLike,
) -> jax.Array:
    """Return einsum(spec, a, b) in `result_dtype`, of `a` and `b` rounded to the dtype `operand_dtype`.

    `a` and `b` may be wider than `operand_dtype`. Their gradients are then wide too: sums in float32
    that are not rounded, of a gradient of the result that is rounded to `operand_dtype`. Each letter of
    `spec` stands in two of its three terms or in all.
    """
    alike = {jnp.dtype(each) for each in (a.dtype, b.dtype, operand_dtype, result_dtype)}
    if len(alike) == 1:  # nothing to round; and unlike a custom gradient, einsum has a jvp
        return jnp.einsum(spec, a, b)
    return _contract(spec, jnp.dtype(operand_dtype).name, jnp.dtype(result_dtype).name, a, b)


def accumulation_dtype(operand_dtype: DTypeLike, softmax_dtype: DTypeLike) -> Any:
    """Return the dtype of sums of products: the softmax's, unless that is the narrower one."""
    return jnp.promote_types(operand_dtype, softmax_dtype)


def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return `x` with the digits that it has in another dtype, in its own.

    By `reduce_precision`, because XLA leaves out a conversion to a narrow dtype and back
    (`xla_allow_excess_precision` is on by default).
    """
    info = jnp.finfo(dtype)
    if info.bits >= jnp.finfo(x.dtype).bits:
        return x
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def split_high_low(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Return `x` rounded to `dtype`, and what is left of it in `dtype` too; None: nothing can be.

    The sum of both has twice the digits of one. What is rounded is worth its room anyway where it
    is a result that somebody else keeps.
    """
    digits = round_to_dtype(x, dtype)
    rest = None if digits is x else (x - digits).astype(dtype)
    return digits.astype(dtype), rest


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _contract(spec: str, operands: str, dtype: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return _einsum(spec, a.astype(operands), b.astype(operands), dtype)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return einsum(spec, a, b) in `dtype`, of operands that stay narrow except on a CPU.

    XLA's CPU compiler computes such products in float32 anyway, but fails at some shapes when they
    are given in 16 bits: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
    """

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=dtype)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        sums = jnp.promote_types(jnp.float32, dtype)
        return jnp.einsum(spec, a.astype(sums), b.astype(sums)).astype(dtype)

    # Decided as the program is lowered: it may be compiled for hardware that is not here.
    found: jax.Array = jax.lax.platform_dependent(a, b, cpu=widened, default=narrow)
    return found


def _forward(spec: str, operands: str, dtype: str, a: jax.Array, b: jax.Array) -> Any:
    # Empty arrays remember what the gradients are like: a residual is an array, not a dtype.
    like = jnp.zeros((0, *a.shape), a.dtype), jnp.zeros((0, *b.shape), b.dtype)
    narrow = a.astype(operands), b.astype(operands)
    return _contract(spec, operands, dtype, a, b), (narrow, like)


def _backward(spec: str, operands: str, dtype: str, kept: Any, cotangent: jax.Array) -> Any:
    (a, b), (like_a, like_b) = kept
    inputs, out = spec.split("->")
    of_a, of_b = inputs.split(",")
    narrow = cotangent.astype(operands)
    da = _einsum(f"{out},{of_b}->{of_a}", narrow, b, like_a.dtype)
    db = _einsum(f"{of_a},{out}->{of_b}", a, narrow, like_b.dtype)
    return _summed_like(da, like_a.shape[1:]), _summed_like(db, like_b.shape[1:])


def _summed_like(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of an array that einsum has broadcast along axes of length 1."""
    axes = [axis for axis, size in enumerate(shape) if x.shape[axis] != size]
    return x.sum(axes, keepdims=True) if axes else x


_contract.defvjp(_forward, _backward)

"""Gradients of normalization layers in two passes over the tokens, for GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer.layers.basic import broadcast_vector
from transformer.layers.layer_config import NormConfig
from transformer.precision import DType


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm_in_two_passes(
    config: NormConfig,
    dtype: DType,  # of the statistics
    x: jax.Array,  # [..., D]
    gain: jax.Array,  # [D]
    bias: jax.Array | None,  # [D]
) -> jax.Array:  # [..., D]
    """Return `layer_norm` or `rms_norm` of 16-bit x in its dtype, with gradients for a GPU.

    dx sums over D, and the gradients of gain and bias sum over tokens. In the program of autodiff
    both read dy * (x - mean) / sqrt(var + epsilon), which XLA then writes to memory in the dtype of
    the statistics. Here each reads x and dy, in 16 bits. Has no forward-mode derivative.
    """
    return _forward(config, dtype, x, gain, bias)[0]


def _forward(
    config: NormConfig, dtype: DType, x: jax.Array, gain: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Any]:
    wide = x.astype(dtype)
    mean = jnp.zeros((), dtype)
    if config.kind == "layer":
        mean = jnp.mean(wide, axis=-1, keepdims=True)
    centered = wide - mean
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + config.epsilon)
    y = centered * inverse * broadcast_vector(gain, wide)
    y = y if bias is None else y + broadcast_vector(bias, y)
    return y.astype(x.dtype), (x, mean, inverse, gain, bias)


def _backward(
    config: NormConfig, dtype: DType, saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of x, gain and bias.

    With n = (x - mean) / s and g = dy gain:

        dx = (g - mean(g) - n mean(g n)) / s        dgain = sum dy n        dbias = sum dy

    Means are over D (mean(g) only if x is centered), sums over tokens.
    """
    x, mean, inverse, gain, bias = saved
    normalized = (x.astype(dtype) - mean) * inverse
    g = dy.astype(dtype) * broadcast_vector(gain, normalized)
    dx = g - normalized * jnp.mean(g * normalized, axis=-1, keepdims=True)
    if config.kind == "layer":
        dx -= jnp.mean(g, axis=-1, keepdims=True)
    dx = (dx * inverse).astype(x.dtype)
    # The barrier keeps XLA from sharing `normalized` with dx, and so from writing it to memory.
    x, mean, inverse, dy = jax.lax.optimization_barrier((x, mean, inverse, dy))
    normalized = (x.astype(dtype) - mean) * inverse
    tokens, dy = tuple(range(x.ndim - 1)), dy.astype(dtype)
    d_gain = jnp.sum(dy * normalized, axis=tokens).astype(gain.dtype)
    d_bias = None if bias is None else jnp.sum(dy, axis=tokens).astype(bias.dtype)
    return dx, d_gain, d_bias


norm_in_two_passes.defvjp(_forward, _backward)

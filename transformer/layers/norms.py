"""Normalization: LayerNorm and RMSNorm, with gradients in two passes over the tokens for GPUs."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer.layers.basic import declare_weight
from transformer.model_context import ModelContext
from transformer.precision import DType
from transformer.validation import NonNegativeFloat, Settings

NormKind = Literal["layer", "rms", "rms_offset"]


@dataclasses.dataclass(frozen=True)
class NormConfig(Settings):
    """Normalization over the last axis."""

    kind: NormKind = "layer"
    """`layer`: LayerNorm (Ba et al. 2016). `rms`: RMSNorm (Zhang and Sennrich 2019).
    `rms_offset`: RMSNorm whose gain is 1 + weight, so that weight decay pulls it to 1 (Gemma)."""
    epsilon: NonNegativeFloat = 1e-5
    """Added to the variance (or mean square) before the square root."""
    bias: bool = True
    """Add a bias after the gain. LayerNorm only."""


def layer_norm(
    x: Float[Array, "... D"],
    gain: Float[Array, "*heads D"],
    bias: Float[Array, "*heads D"] | None,
    epsilon: float,
) -> Float[Array, "... D"]:
    """Return gain * (x - mean) / sqrt(var + epsilon) + bias, in the dtype of x."""
    # Two passes: the variance of centered values does not cancel as E[x^2] - E[x]^2 does.
    y = rms_norm(x - jnp.mean(x, axis=-1, keepdims=True), gain, epsilon)
    return y if bias is None else y + broadcast_vector(bias, y)


def rms_norm(
    x: Float[Array, "... D"],
    gain: Float[Array, "*heads D"],
    epsilon: float,
) -> Float[Array, "... D"]:
    """Return gain * x / sqrt(mean(x^2) + epsilon), in the dtype of x."""
    return x * inverse_rms(x, epsilon) * broadcast_vector(gain, x)


def inverse_rms(x: Float[Array, "... D"], epsilon: float) -> Float[Array, "... 1"]:
    """Return 1 / sqrt(mean(x^2) + epsilon)."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def broadcast_vector(vector: Float[Array, "*heads D"], x: jax.Array) -> jax.Array:
    """Return [D] as [1, ..., D] in the dtype of x (tests raise on implicit rank promotion)."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


class Norm(nn.Module):
    """Normalization layer. Computes in `precision.norm` and returns the dtype of its input."""

    config: NormConfig
    context: ModelContext
    axes: tuple[str, ...] = ("embed",)  # logical axes of the gain and bias: the last ones of x

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        config, precision = self.config, self.context.precision
        *heads, width = zip(self.axes, x.shape[-len(self.axes) :], strict=True)
        declare = functools.partial(
            declare_weight,
            self,
            stack=dict(heads),
            outputs=dict([width]),
            dtype=precision.parameters,
        )
        if config.kind == "rms_offset":
            gain = 1 + declare("offset", init=nn.initializers.zeros).astype(precision.norm)
        else:
            gain = declare("gain", init=nn.initializers.ones)
        has_bias = config.kind == "layer" and config.bias
        bias = declare("bias", init=nn.initializers.zeros) if has_bias else None
        if self.context.hardware.platform == "gpu" and x.itemsize == 2 and self.axes == ("embed",):
            return norm_in_two_passes(config, precision.norm, x, gain, bias)
        wide = x.astype(precision.norm)
        if config.kind == "layer":
            return layer_norm(wide, gain, bias, config.epsilon).astype(x.dtype)
        return rms_norm(wide, gain, config.epsilon).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm_in_two_passes(
    config: NormConfig,
    dtype: DType,  # of the statistics
    x: Float[Array, "... D"],
    gain: Float[Array, "D"],
    bias: Float[Array, "D"] | None,
) -> Float[Array, "... D"]:
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
    inverse = inverse_rms(centered, config.epsilon)
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

"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.layers.config import NormConfig
from transformer.layers.params import declare_weight
from transformer.precision import Precision


def layer_norm(
    x: jax.Array,  # [..., D]
    gain: jax.Array,  # [D]
    bias: jax.Array | None,  # [D]
    epsilon: float,
) -> jax.Array:  # [..., D]
    """Return gain * (x - mean) / sqrt(var + epsilon) + bias, in the dtype of x."""
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    # Two passes: the variance of centered values does not cancel as E[x^2] - E[x]^2 does.
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + epsilon) * _broadcast(gain, x)
    return y if bias is None else y + _broadcast(bias, y)


def rms_norm(
    x: jax.Array,  # [..., D]
    gain: jax.Array,  # [D]
    epsilon: float,
) -> jax.Array:  # [..., D]
    """Return gain * x / sqrt(mean(x^2) + epsilon), in the dtype of x."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * _broadcast(gain, x)


def _broadcast(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Return [D] as [1, ..., D] in the dtype of x (tests raise on implicit rank promotion)."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Norm(nn.Module):
    """Normalization layer. Computes in `precision.norm` and returns the dtype of its input."""

    config: NormConfig
    precision: Precision
    axis: str = "embed"  # logical axis of the gain and bias

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        config, dtype = self.config, self.precision.parameters
        outputs = {self.axis: x.shape[-1]}
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        gain = declare_weight(self, "gain", outputs=outputs, init=ones, dtype=dtype)
        x_wide = x.astype(self.precision.norm)
        if config.kind == "rms":
            return rms_norm(x_wide, gain, config.epsilon).astype(x.dtype)
        bias = None
        if config.bias:
            bias = declare_weight(self, "bias", outputs=outputs, init=zeros, dtype=dtype)
        return layer_norm(x_wide, gain, bias, config.epsilon).astype(x.dtype)

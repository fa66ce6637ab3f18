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
    """gain * (x - mean) / sqrt(var + epsilon) + bias, in the dtype of x."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = _scaled(centred * jax.lax.rsqrt(variance + epsilon), gain)
    return y if bias is None else y + _broadcast(bias, y)


def rms_norm(
    x: jax.Array,  # [..., D]
    gain: jax.Array,  # [D]
    epsilon: float,
) -> jax.Array:  # [..., D]
    """gain * x / sqrt(mean(x^2) + epsilon), in the dtype of x."""
    square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return _scaled(x * jax.lax.rsqrt(square + epsilon), gain)


def _scaled(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * _broadcast(gain, x)


def _broadcast(vector: jax.Array, x: jax.Array) -> jax.Array:
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Norm(nn.Module):
    """Declares gain and bias; computes in `precision.norm`, returns the dtype that came in."""

    config: NormConfig
    precision: Precision
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        config, dtype = self.config, self.precision.parameters
        outputs = {self.axis: x.shape[-1]}
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        gain = declare_weight(self, "gain", outputs=outputs, init=ones, dtype=dtype)
        wide = x.astype(self.precision.norm)
        if config.kind == "rms":
            return rms_norm(wide, gain, config.epsilon).astype(x.dtype)
        bias = None
        if config.bias:
            bias = declare_weight(self, "bias", outputs=outputs, init=zeros, dtype=dtype)
        return layer_norm(wide, gain, bias, config.epsilon).astype(x.dtype)

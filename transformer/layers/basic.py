"""Basic layers: weights with named axes, linear maps, norms and dropout.

Axis letters of the project, used in every einsum and every shape comment:

    B batch            D model width         F feed-forward width    L layers
    T query positions  N query heads         V vocabulary            P places in the layer pattern
    S key positions    K key-value heads     E experts               M random features
    H head width       G query heads for each key-value head
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from transformer.config import Initializer, TransformerConfig
from transformer.layers.layer_config import NormConfig
from transformer.layers.logical_axes import BoxedWeight, LogicalAxes
from transformer.layers.low_rank import LowRankWeight
from transformer.model_context import ModelContext
from transformer.shape_errors import MAX_WEIGHT_SIZE, reject_weight, reject_weight_size


def declare_weight(
    module: nn.Module,
    name: str,
    *,
    stack: Mapping[str, int] | None = None,  # sizes of repetition axes (experts)
    inputs: Mapping[str, int] | None = None,  # sizes of the axes that a product sums over
    outputs: Mapping[str, int],  # sizes of the other axes
    init: Initializer,  # called with the whole shape
    dtype: Any,  # of the stored parameter
) -> jax.Array:  # [*stack, *inputs, *outputs]
    """Declare the parameter `name` of `module` and return its value.

    `declare_weight(self, "query", inputs={"embed": D}, outputs={"heads": N, "head": H}, ...)`
    is [D, N, H]. ValueError: the weight is larger than any memory, or given with another shape.
    """
    stack, inputs = stack or {}, inputs or {}
    axes = LogicalAxes(tuple(stack), tuple(inputs), tuple(outputs))
    shape = (*stack.values(), *inputs.values(), *outputs.values())
    if math.prod(shape) > MAX_WEIGHT_SIZE:
        reject_weight_size(name, shape)
    if module.has_variable("params", name):
        # Not `module.param`: in `apply` it traces `init` only to compare shapes.
        given: Any = meta.unbox(module.get_variable("params", name))
        kinds = {jnp.issubdtype(x, jnp.floating) for x in (dtype, getattr(given, "dtype", dtype))}
        if getattr(given, "shape", None) != shape or len(kinds) > 1:
            reject_weight(name, given, shape)
        return given
    # Linen unboxes: the value is the array, and `init` also returns the axes.
    value: Any = module.param(name, lambda key: BoxedWeight(init(key, shape, dtype), axes))
    return value


def declare_table(
    module: nn.Module,
    name: str,
    inputs: dict[str, int],
    outputs: dict[str, int],
    config: TransformerConfig,
) -> jax.Array:  # [*inputs, *outputs]
    """Declare an embedding table of `module`, with the initial values of embeddings."""
    init = lambda *given: config.initialization.embedding_initializer()(*given)  # noqa: E731
    dtype = config.precision.parameters
    return declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)


def apply_matrix(
    x: jax.Array,  # [B, T, *inputs]
    matrix: jax.Array | LowRankWeight,  # [*inputs, *outputs]
    num_input_axes: int,
    flatten: bool,
) -> jax.Array:  # [B, T, *outputs]
    """Contract the last `num_input_axes` axes of x with a matrix, as one 2-D matrix.

    `flatten` also merges B and T, which is faster on CPU: see `ModelContext.flatten_tokens`.
    """
    if isinstance(matrix, LowRankWeight):
        low_rank = apply_matrix(x, matrix.a, num_input_axes, flatten)  # [B, T, rank]
        update = matrix.scale * apply_matrix(low_rank, matrix.b, 1, flatten)
        return apply_matrix(x, matrix.base, num_input_axes, flatten) + update
    rows = math.prod(matrix.shape[:num_input_axes])
    lead = x.shape[: x.ndim - num_input_axes]
    flat = x.reshape((-1, rows) if flatten else (*lead, rows))
    return (flat @ matrix.reshape(rows, -1)).reshape(*lead, *matrix.shape[num_input_axes:])


def apply_linear(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, *inputs]
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    context: ModelContext,
    *,
    bias: bool,
    residual: bool = False,
) -> jax.Array:  # [B, T, *outputs]
    """Declare a linear layer of `module` (see `declare_linear`) and apply it."""
    w, b = declare_linear(module, name, inputs, outputs, context, bias=bias, residual=residual)
    y = apply_matrix(x, w, len(inputs), context.flatten_tokens)
    if b is None:
        return y
    # A vector: matrix libraries of GPUs add one to a product while they write it.
    return (y.reshape(*y.shape[:2], b.size) + b.astype(y.dtype).reshape(1, 1, -1)).reshape(y.shape)


def declare_linear(
    module: nn.Module,
    name: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    context: ModelContext,
    *,
    bias: bool,
    residual: bool = False,
) -> tuple[jax.Array, jax.Array | None]:  # [*inputs, *outputs], [*outputs]
    """Declare a matrix `name` and, if `bias`, a vector `name_bias`; return them in compute dtype.

    `residual` marks a layer that writes to the residual stream: its initial values are scaled
    down with depth (see `Initialization.depth_scaled`).
    """
    precision, zeros = context.precision, nn.initializers.zeros
    initializer, depth = context.initialization.matrix_initializer, residual * context.num_layers
    init = lambda *args: initializer(inputs, num_residual_layers=depth)(*args)  # noqa: E731
    dtype = precision.parameters
    w = declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    w = w.astype(precision.compute)
    if not bias:
        return w, None
    b = declare_weight(module, f"{name}_bias", outputs=outputs, init=zeros, dtype=dtype)
    return w, b.astype(precision.compute)


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
    y = centered * jax.lax.rsqrt(variance + epsilon) * broadcast_vector(gain, x)
    return y if bias is None else y + broadcast_vector(bias, y)


def rms_norm(
    x: jax.Array,  # [..., D]
    gain: jax.Array,  # [D]
    epsilon: float,
) -> jax.Array:  # [..., D]
    """Return gain * x / sqrt(mean(x^2) + epsilon), in the dtype of x."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * broadcast_vector(gain, x)


def broadcast_vector(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Return [D] as [1, ..., D] in the dtype of x (tests raise on implicit rank promotion)."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Norm(nn.Module):
    """Normalization layer. Computes in `precision.norm` and returns the dtype of its input."""

    config: NormConfig
    context: ModelContext
    axis: str = "embed"  # logical axis of the gain and bias

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., D]
        config, precision, axes = self.config, self.context.precision, {self.axis: x.shape[-1]}
        declare = functools.partial(declare_weight, self, outputs=axes, dtype=precision.parameters)
        if config.kind == "rms_offset":
            gain = 1 + declare("offset", init=nn.initializers.zeros).astype(precision.norm)
        else:
            gain = declare("gain", init=nn.initializers.ones)
        has_bias = config.kind == "layer" and config.bias
        bias = declare("bias", init=nn.initializers.zeros) if has_bias else None
        if self.context.hardware.platform == "gpu" and x.itemsize == 2 and self.axis == "embed":
            from transformer.layers.norm_gradients import norm_in_two_passes

            return norm_in_two_passes(config, precision.norm, x, gain, bias)
        wide = x.astype(precision.norm)
        if config.kind == "layer":
            return layer_norm(wide, gain, bias, config.epsilon).astype(x.dtype)
        return rms_norm(wide, gain, config.epsilon).astype(x.dtype)


def dropout(
    x: jax.Array,  # [B, ...]
    dropout_rate: float,
    dropout_rngs: jax.Array | None,  # [B] typed random keys; None: not training
) -> jax.Array:  # [B, ...]
    """Zero each entry with probability `dropout_rate` and divide the others by 1 - rate."""
    if dropout_rngs is None or dropout_rate == 0:
        return x
    draw = lambda key: jax.random.bernoulli(key, 1 - dropout_rate, x.shape[1:])  # noqa: E731
    return jnp.where(jax.vmap(draw)(dropout_rngs), x / (1 - dropout_rate), jnp.zeros_like(x))


def fold_in(
    rngs: jax.Array | None,  # [B]
    data: int | jax.Array,
) -> jax.Array | None:  # [B]
    """Return `jax.random.fold_in` of each key of a batch; None stays None."""
    return None if rngs is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, data)

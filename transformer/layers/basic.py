"""Basic layers: weights with named axes, linear maps and dropout.

Axis letters of the project, used in every einsum and every shape annotation:

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
from jaxtyping import Array, Float, Key, Shaped

from transformer.layers.logical_axes import LogicalAxes, with_axes
from transformer.layers.low_rank import LowRankWeight
from transformer.layers.quantized import (
    QuantizedWeight,
    multiply_codes,
    multiply_dequantized,
    order_after,
)
from transformer.model_context import Initializer, ModelContext

MAX_WEIGHT_SIZE = 2**44
"""Most entries of one weight of one layer. XLA counts the bytes of all layers in 64 bits, and ends
the process beyond."""


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
        sizes = " x ".join(map(str, shape))
        raise ValueError(
            f"weight {name}: {sizes} entries are more than any memory holds; lower the model's "
            "sizes"
        )
    if module.has_variable("params", name):
        # Not `module.param`: in `apply` it traces `init` only to compare shapes.
        given: Any = meta.unbox(module.get_variable("params", name))
        if given.shape != shape or not jnp.issubdtype(given.dtype, jnp.floating):
            raise ValueError(
                f"weight {name} of shape {given.shape}, {given.dtype}: the model has floats of "
                f"shape {shape}; give the parameters of this configuration"
            )
        return given
    value: Any = module.param(name, lambda key: with_axes(init(key, shape, dtype), axes))
    return value


def declare_table(
    module: nn.Module,
    name: str,
    *,
    inputs: Mapping[str, int] | None = None,
    outputs: Mapping[str, int],
    context: ModelContext,
) -> Float[Array, "..."]:  # [*inputs, *outputs]
    """Declare an embedding table of `module`, with the initial values of embeddings."""
    return declare_weight(
        module,
        name,
        inputs=inputs,
        outputs=outputs,
        init=context.initialization.embedding_initializer(),
        dtype=context.precision.parameters,
    )


def apply_matrix(
    x: Float[Array, "B T *inputs"],
    matrix: Float[Array, "..."] | LowRankWeight | QuantizedWeight,  # [*inputs, *outputs]
    num_input_axes: int,
    flatten: bool,
) -> Float[Array, "B T *outputs"]:
    """Contract the last `num_input_axes` axes of x with a matrix, as one 2-D matrix.

    `flatten` also merges B and T, which is faster on CPU: see `ModelContext.flatten_tokens`.
    """
    if isinstance(matrix, LowRankWeight):
        low_rank = apply_matrix(x, matrix.a, num_input_axes, flatten)  # [B, T, rank]
        update = matrix.scale * apply_matrix(low_rank, matrix.b, 1, flatten)
        return apply_matrix(x, matrix.base, num_input_axes, flatten) + update
    if isinstance(matrix, QuantizedWeight):
        matrix = order_after(matrix, x) if flatten else matrix
        # In float32: sums of codes overflow float16.
        dtype = jnp.float32 if matrix.has_channel_scales else None
        product = functools.partial(
            contract, num_input_axes=num_input_axes, flatten=flatten, dtype=dtype
        )
        if matrix.has_channel_scales:
            return multiply_codes(product, x, matrix).astype(x.dtype)
        return multiply_dequantized(product, x, matrix)
    return contract(x, matrix, num_input_axes, flatten)


def contract(
    x: Float[Array, "B T *inputs"],
    matrix: Float[Array, "..."],  # [*inputs, *outputs]
    num_input_axes: int,
    flatten: bool,
    dtype: Any = None,  # of the result
) -> Float[Array, "B T *outputs"]:
    """Contract as `apply_matrix` does, with an array."""
    rows = math.prod(matrix.shape[:num_input_axes])
    lead = x.shape[: x.ndim - num_input_axes]
    flat = x.reshape((-1, rows) if flatten else (*lead, rows))
    y = jnp.matmul(flat, matrix.reshape(rows, -1), preferred_element_type=dtype)
    return y.reshape(*lead, *matrix.shape[num_input_axes:])


def apply_linear(
    module: nn.Module,
    name: str,
    x: Float[Array, "B T *inputs"],
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    context: ModelContext,
    *,
    bias: bool,
    residual: bool = False,
) -> Float[Array, "B T *outputs"]:
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
    precision = context.precision
    w = declare_weight(
        module,
        name,
        inputs=inputs,
        outputs=outputs,
        init=context.initialization.matrix_initializer(
            inputs, num_residual_layers=context.num_layers if residual else 0
        ),
        dtype=precision.parameters,
    ).astype(precision.compute)
    if not bias:
        return w, None
    b = declare_weight(
        module,
        f"{name}_bias",
        outputs=outputs,
        init=nn.initializers.zeros,
        dtype=precision.parameters,
    )
    return w, b.astype(precision.compute)


def dropout(
    x: Shaped[Array, "B ..."],
    dropout_rate: float,
    dropout_rngs: Key[Array, "B"] | None,  # typed random keys; None: not training
) -> Shaped[Array, "B ..."]:
    """Zero each entry with probability `dropout_rate` and divide the others by 1 - rate."""
    if dropout_rngs is None or dropout_rate == 0:
        return x

    def draw_kept(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1 - dropout_rate, x.shape[1:])

    return jnp.where(jax.vmap(draw_kept)(dropout_rngs), x / (1 - dropout_rate), jnp.zeros_like(x))


def fold_in(
    rngs: Key[Array, "B"] | None,
    data: int | jax.Array,
) -> Key[Array, "B"] | None:
    """Return `jax.random.fold_in` of each key of a batch; None stays None."""
    return None if rngs is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, data)

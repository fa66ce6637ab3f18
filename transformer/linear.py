"""Linear maps between groups of named axes."""

import math
from collections.abc import Mapping

import jax
from flax import linen as nn

from transformer.shared import ModelContext
from transformer.weights import declare_weight


def apply_matrix(
    x: jax.Array,  # [B, T, *inputs]
    matrix: jax.Array,  # [*inputs, *outputs]
    num_input_axes: int,  # how many axes are summed over
    flatten: bool,
) -> jax.Array:  # [B, T, *outputs]
    """Sums over the last `num_input_axes` axes of x, as one product of matrices."""
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
    """Declares a matrix `name` (and `name_bias`) of `module` and applies it.

    `residual` says that the result is added to the residual stream, which matters to how the
    matrix starts.
    """
    w, b = declare_linear(module, name, inputs, outputs, context, bias=bias, residual=residual)
    y = apply_matrix(x, w, len(inputs), context.flatten_tokens)
    return y if b is None else y + b.astype(y.dtype)[None, None]


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
    """What `linear` declares, of the dtype that is computed in."""
    precision, start = context.precision, context.initialization
    init = start.matrix_initializer(
        inputs, num_residual_layers=context.num_layers if residual else 0
    )
    dtype = precision.parameters
    w = declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    w = w.astype(precision.compute)
    if not bias:
        return w, None
    zeros = nn.initializers.zeros
    b = declare_weight(module, f"{name}_bias", outputs=outputs, init=zeros, dtype=dtype)
    return w, b.astype(precision.compute)

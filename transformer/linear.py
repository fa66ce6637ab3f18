"""Linear maps between groups of named axes."""

import math
from collections.abc import Mapping

import jax
from flax import linen as nn

from transformer.shared import Shared
from transformer.weights import weight


def apply_matrix(
    x: jax.Array,  # [B, T, *inputs]
    matrix: jax.Array,  # [*inputs, *outputs]
    inputs: int,  # how many axes are summed over
    flatten: bool,
) -> jax.Array:  # [B, T, *outputs]
    """Sums over the last `inputs` axes of x, as one product of matrices."""
    rows = math.prod(matrix.shape[:inputs])
    lead = x.shape[: x.ndim - inputs]
    flat = x.reshape((-1, rows) if flatten else (*lead, rows))
    return (flat @ matrix.reshape(rows, -1)).reshape(*lead, *matrix.shape[inputs:])


def linear(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, *inputs]
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    shared: Shared,
    *,
    bias: bool,
    residual: bool = False,
) -> jax.Array:  # [B, T, *outputs]
    """Declares a matrix `name` (and `name_bias`) of `module` and applies it.

    `residual` says that the result is added to the residual stream, which matters to how the
    matrix starts.
    """
    w, b = matrix(module, name, inputs, outputs, shared, bias=bias, residual=residual)
    y = apply_matrix(x, w, len(inputs), shared.flattens_tokens)
    return y if b is None else y + b.astype(y.dtype)[None, None]


def matrix(
    module: nn.Module,
    name: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    shared: Shared,
    *,
    bias: bool,
    residual: bool = False,
) -> tuple[jax.Array, jax.Array | None]:  # [*inputs, *outputs], [*outputs]
    """What `linear` declares, of the dtype that is computed in."""
    precision, start = shared.precision, shared.initialization
    init = start.matrix(inputs, residual_layers=shared.layers if residual else 0)
    dtype = precision.parameters
    w = weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    w = w.astype(precision.compute)
    if not bias:
        return w, None
    zeros = nn.initializers.zeros
    b = weight(module, f"{name}_bias", outputs=outputs, init=zeros, dtype=dtype)
    return w, b.astype(precision.compute)

"""Weights with named axes: declared once with shape, axes and initializer together.

The project's alphabet, used in every einsum and every shape comment:

    B batch            D model width         F feed-forward width    L layers
    T query positions  N query heads         V vocabulary            P places in the layer pattern
    S key positions    K key-value heads     E experts               M random features
    H head width       G query heads for each key-value head

Whatever treats weights differently (sharding, weight decay, Muon, LoRA, 8-bit blocks) asks for the
names of the axes and never for `ndim`: a stacked norm scale has two axes and is no matrix.

Linear maps between groups of named axes.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import struct
from flax.core import meta

from transformer.config import Initializer
from transformer.context import ModelContext


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """The logical axes of one weight, in the order in which they lie in memory.

    `stack` are axes of repetition (layers, experts), `inputs` those that a product sums over,
    `outputs` those that it leaves. A bias or a norm's gain has no inputs.
    """

    stack: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.stack + self.inputs + self.outputs

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is a linear map: what weight decay and Muon act on."""
        return bool(self.inputs and self.outputs)


class BoxedWeight(struct.PyTreeNode, meta.AxisMetadata):
    """A weight together with its axes: what modules make, and what `unbox` takes apart."""

    value: Any
    axes: LogicalAxes = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "BoxedWeight":
        return self.replace(value=val)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> "BoxedWeight":
        if index != 0:
            raise ValueError(f"weights are stacked along their first axis, not axis {index}")
        return self.with_stack_axis(params[nn.PARTITION_NAME])

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> "BoxedWeight":
        return self.replace(axes=dataclasses.replace(self.axes, stack=self.axes.stack[1:]))

    def with_stack_axis(self, name: str) -> "BoxedWeight":
        """The same weight with one more axis of repetition in front."""
        axes = dataclasses.replace(self.axes, stack=(name, *self.axes.stack))
        return self.replace(axes=axes)


def is_boxed_weight(leaf: Any) -> bool:
    """Whether this is a weight with its axes: a leaf to `jax.tree.map`."""
    return isinstance(leaf, BoxedWeight)


MAX_WEIGHT_SIZE = 2**44
"""Numbers of one weight of one layer. XLA counts bytes in 64 bits, those of all layers together."""


def declare_weight(
    module: nn.Module,
    name: str,
    *,
    stack: Mapping[str, int] | None = None,
    inputs: Mapping[str, int] | None = None,
    outputs: Mapping[str, int],
    init: Initializer,
    dtype: Any,
) -> jax.Array:
    """Declares the parameter `name` of `module`: its axes are `stack`, `inputs`, then `outputs`.

    `weight(self, "query", inputs={"embed": D}, outputs={"heads": N, "head": H}, ...)` is [D, N, H].
    """
    stack, inputs = stack or {}, inputs or {}
    axes = LogicalAxes(tuple(stack), tuple(inputs), tuple(outputs))
    shape = (*stack.values(), *inputs.values(), *outputs.values())
    if math.prod(shape) > MAX_WEIGHT_SIZE:
        raise ValueError(
            f"weight {name}: {' x '.join(map(str, shape))} numbers are more than any memory has; "
            "lower the model's sizes"
        )
    value: Any = module.param(name, lambda key: BoxedWeight(init(key, shape, dtype), axes))
    return value  # Linen takes it out of its box


def unbox_axes(boxed: Any) -> Any:
    """A tree of `Weight`s -> the like tree of `Axes`."""
    return jax.tree.map(lambda leaf: leaf.axes, boxed, is_leaf=is_boxed_weight)


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

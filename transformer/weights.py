"""Weights with named axes: declared once with shape, axes and initializer together.

The project's alphabet, used in every einsum and every shape comment:

    B batch            D model width         F feed-forward width    L layers
    T query positions  N query heads         V vocabulary            P places in the layer pattern
    S key positions    K key-value heads     E experts               M random features
    H head width       G query heads for each key-value head

Whatever treats weights differently (sharding, weight decay, Muon, LoRA, 8-bit blocks) asks for the
names of the axes and never for `ndim`: a stacked norm scale has two axes and is no matrix.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import struct
from flax.core import meta

from transformer.initialization import Initialization as Initialization
from transformer.initialization import Initializer as Initializer


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

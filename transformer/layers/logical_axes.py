"""Logical axis names of weights, carried beside their values.

Code that treats weights differently (sharding, weight decay, Muon, LoRA, 8-bit optimizer blocks)
asks for axis names and never for `ndim`: a stacked norm gain has two axes and is not a matrix.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import struct
from flax.core import meta


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """Axis names of one weight, in memory order: `stack`, then `inputs`, then `outputs`.

    A bias or a norm's gain has no inputs.
    """

    stack: tuple[str, ...] = ()
    """Axes of repetition: layers, experts."""
    inputs: tuple[str, ...] = ()
    """Axes that a product with the weight sums over."""
    outputs: tuple[str, ...] = ()
    """Axes of the product's result."""

    @property
    def names(self) -> tuple[str, ...]:
        """All axis names in memory order."""
        return self.stack + self.inputs + self.outputs

    @property
    def is_matrix(self) -> bool:
        """True for linear maps, which weight decay and Muon apply to."""
        return bool(self.inputs and self.outputs)


class BoxedWeight(struct.PyTreeNode, meta.AxisMetadata):
    """A weight with its axes, as `module.init` creates it while axes are recorded.

    `add_axis` and `remove_axis` are Flax's interface for `nn.scan` and `nn.vmap`.
    """

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
        """Return the weight with the name of a leading stack axis added; `value` has the axis."""
        axes = dataclasses.replace(self.axes, stack=(name, *self.axes.stack))
        return self.replace(axes=axes)


_recording = contextvars.ContextVar("recording", default=False)


def with_axes(value: jax.Array, axes: LogicalAxes) -> Any:
    """Return the initial value of a weight; with its axes if `abstract_weights` asks for them."""
    return BoxedWeight(value, axes) if _recording.get() else value


def records_axes() -> bool:
    """Return True while `abstract_weights` traces."""
    return _recording.get()


@contextlib.contextmanager
def _record_axes() -> Iterator[None]:
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def abstract_weights(init: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
    """Return the shapes and the `LogicalAxes` of the parameters that `init` returns.

    Args:
      init: `init` of a module, which is traced once.
      inputs: A random key, and the inputs.
    """
    with _record_axes():
        # A new function: JAX would answer from an earlier trace without axes.
        boxed = jax.eval_shape(lambda *inputs: init(*inputs), *inputs).get("params", {})
    return meta.unbox(boxed), unbox_axes(boxed)


UNNAMED_AXIS = "unnamed"
"""Axis of a weight that was declared without names. No mesh axis splits it."""


def is_boxed_weight(leaf: Any) -> bool:
    """Return True for a `BoxedWeight`: the `is_leaf` of trees of them."""
    return isinstance(leaf, BoxedWeight)


def box_weights(weights: Any) -> Any:
    """Return a tree of weights of one layer with all leaves in `BoxedWeight`s.

    Weights of a user's own module, from `self.param` or a layer of Flax such as `nn.Dense`, have no
    axis names. Their last axis counts as the output and the axes before it as inputs, as in Flax's
    kernels; a vector has no inputs. This has to be decided for one layer: stacked over layers, a
    bias has two axes too.
    """

    def box(leaf: Any) -> BoxedWeight:
        if isinstance(leaf, BoxedWeight):
            return leaf
        names = (UNNAMED_AXIS,) * jax.numpy.ndim(leaf)
        return BoxedWeight(leaf, LogicalAxes(inputs=names[:-1], outputs=names[-1:]))

    # Boxes of other kinds (`nn.with_partitioning`) hold names of another table.
    boxes = (BoxedWeight, meta.AxisMetadata)
    is_box = lambda leaf: isinstance(leaf, boxes)  # noqa: E731
    unboxed = lambda leaf: leaf if is_boxed_weight(leaf) else meta.unbox(leaf)  # noqa: E731
    return jax.tree.map(lambda leaf: box(unboxed(leaf)), weights, is_leaf=is_box)


def unbox_axes(boxed: Any) -> Any:
    """Return the tree of `LogicalAxes` of a tree of weights."""
    return jax.tree.map(lambda leaf: leaf.axes, box_weights(boxed), is_leaf=is_boxed_weight)

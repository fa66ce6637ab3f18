"""Small weights: the matrices of a model's layers in 8 or 4 bits, for inference or under LoRA.

    params = quantize_weights(params, model.logical_axes(), "int4")
    model.apply({"params": params}, tokens)

A `QuantizedWeight` takes the place of each linear map that is applied to every token, those that
LoRA may adapt. Embeddings, the output matrix, norms, biases and routers stay as they are.
"""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.low_rank import stands_for_matrix
from transformer.layers.quantized import QuantizedWeight, quantize_weight, quantized_axes
from transformer.lora import Path, is_adaptable

Quantization = Literal["none", "int8", "int4"]
"""`int8`: a scale for each output. `int4`: a scale and a zero point for each group of 64 inputs, or
of 32 or 16 where 64 does not divide them. `none`: weights as they are stored."""

GROUP_SIZE, MIN_GROUP_SIZE = 64, 16
"""Inputs that share a scale in `int4`. Matrices that need smaller groups have 8 bits instead."""


def quantize_weights(
    params: Any, logical_axes: Any, kind: Quantization, *, keep: Collection[Path] = ()
) -> Any:
    """Return parameters with the matrices of the layers in few bits; those that are stay.

    Args:
      params: Parameters of a model, a part of them, or their shapes.
      logical_axes: `model.logical_axes()`.
      kind: Number of bits.
      keep: Paths of matrices that stay as they are.
    """
    if kind == "none":
        return params
    axes = flatten_dict(logical_axes)
    return unflatten_dict(
        {
            path: quantize_leaf(weight, axes[path], kind)
            if is_adaptable(path, axes[path]) and path not in keep
            else weight
            for path, weight in flatten_dict(params).items()
        }
    )


def quantize_leaf(weight: Any, axes: LogicalAxes, kind: Quantization) -> Any:
    """Return one matrix, or its shape, in few bits."""
    if stands_for_matrix(weight):
        return weight
    stack = len(axes.stack)
    rows = math.prod(weight.shape[stack : stack + len(axes.inputs)])
    group_size = math.gcd(rows, GROUP_SIZE)
    bits = 4 if kind == "int4" and group_size >= MIN_GROUP_SIZE else 8
    rounded = functools.partial(quantize_weight, axes=axes, bits=bits, group_size=group_size)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.eval_shape(rounded, weight)
    # One program for a matrix: the steps in between are never in memory as a whole.
    return jax.block_until_ready(jax.jit(rounded)(weight))


def is_quantized(leaf: Any) -> bool:
    """Return True for a `QuantizedWeight`: the `is_leaf` of trees of them."""
    return isinstance(leaf, QuantizedWeight)


def has_quantized(params: Any) -> bool:
    """Return True if some parameters are quantized."""
    return any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized)))


def axes_of_quantized(logical_axes: Any, params: Any) -> Any:
    """Return the tree of `LogicalAxes` of parameters, some of which may be quantized."""
    return jax.tree.map(
        lambda weight, axes: quantized_axes(weight, axes) if is_quantized(weight) else axes,
        params,
        logical_axes,
        is_leaf=is_quantized,
    )


def shapes_as_stored(
    shapes: Any, logical_axes: Any, stored: Mapping[str, jax.ShapeDtypeStruct]
) -> Any:
    """Return shapes of parameters with those weights quantized that a checkpoint has so.

    Args:
      shapes: Shapes of a model's parameters.
      logical_axes: `model.logical_axes()`.
      stored: Shapes of the checkpoint's arrays, by tree path.
    """
    axes, flat = flatten_dict(logical_axes), flatten_dict(shapes)

    def as_stored(path: Path, shape: Any) -> Any:
        name = "/".join(path)
        if f"{name}/codes" not in stored:
            return shape
        stack, num_inputs = len(axes[path].stack), len(axes[path].inputs)
        return QuantizedWeight(
            stored[f"{name}/codes"],
            stored[f"{name}/scales"],
            stored.get(f"{name}/zeros"),
            stored.get(f"{name}/group_of_input"),
            shape.shape[stack : stack + num_inputs],
            len(axes[path].outputs),
            shape.dtype.name,
        )

    return unflatten_dict({path: as_stored(path, shape) for path, shape in flat.items()})

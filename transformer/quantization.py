"""Small weights: the matrices of a model's layers in 8 or 4 bits, for inference or under LoRA.

    params = quantize_weights(params, model.logical_axes(), "int4")
    model.apply({"params": params}, tokens)

A `QuantizedWeight` takes the place of each linear map that is applied to every token, those that
LoRA may adapt. Embeddings, the output matrix, norms, biases and routers stay as they are.
"""

import functools
import math
from typing import Any, Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.layers.logical_axes import LogicalAxes
from transformer.layers.quantized import QuantizedWeight, quantize_weight, quantized_axes
from transformer.lora import is_adaptable

Quantization = Literal["none", "int8", "int4"]
"""`int8`: a scale for each output. `int4`: a scale and a zero point for each group of 64 inputs, or
of 32 or 16 where 64 does not divide them. `none`: weights as they are stored."""

GROUP_SIZE, MIN_GROUP_SIZE = 64, 16
"""Inputs that share a scale in `int4`. Matrices that need smaller groups have 8 bits instead."""


def quantize_weights(params: Any, logical_axes: Any, kind: Quantization) -> Any:
    """Return parameters with the matrices of the layers in few bits; those that are stay.

    Args:
      params: Parameters of a model, or their shapes. Each float matrix can be freed as soon as it
        is quantized, if nothing else refers to it.
      logical_axes: `model.logical_axes()`.
      kind: Number of bits.
    """
    if kind == "none":
        return params
    axes, flat = flatten_dict(logical_axes), flatten_dict(params)
    return unflatten_dict(
        {
            path: _quantize(weight, axes[path], kind) if is_adaptable(path, axes[path]) else weight
            for path, weight in flat.items()
        }
    )


def _quantize(weight: Any, axes: LogicalAxes, kind: Quantization) -> QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return weight
    stack = len(axes.stack)
    rows = math.prod(weight.shape[stack : stack + len(axes.inputs)])
    group_size = math.gcd(rows, GROUP_SIZE)
    bits = 4 if kind == "int4" and group_size >= MIN_GROUP_SIZE else 8
    rounded = functools.partial(quantize_weight, axes=axes, bits=bits, group_size=group_size)
    # One program for a matrix: the steps in between are never in memory as a whole.
    quantized: QuantizedWeight
    if isinstance(weight, jax.ShapeDtypeStruct):
        quantized = jax.eval_shape(rounded, weight)
    else:
        quantized = jax.block_until_ready(jax.jit(rounded)(weight))
    return quantized


def is_quantized(leaf: Any) -> bool:
    """Return True for a `QuantizedWeight`: the `is_leaf` of trees of them."""
    return isinstance(leaf, QuantizedWeight)


def axes_of_quantized(logical_axes: Any, params: Any) -> Any:
    """Return the tree of `LogicalAxes` of parameters, some of which may be quantized."""
    return jax.tree.map(
        lambda weight, axes: quantized_axes(weight, axes) if is_quantized(weight) else axes,
        params,
        logical_axes,
        is_leaf=is_quantized,
    )

"""Convert weights in the layout of PyTorch's modules to the layout of this library.

`read(name, shape)` returns a weight by its PyTorch name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests.fixtures.tiny import Array

Read = Callable[[str, tuple[int, ...]], Array]
Params = dict[str, Any]
Linear = tuple[Array, Array]  # a matrix [inputs, outputs] and a bias [outputs]


def linear(read: Read, at: str, inputs: int, outputs: int) -> Linear:
    """Read an `nn.Linear`, whose matrix is [outputs, inputs]."""
    return read(f"{at}.weight", (outputs, inputs)).T, read(f"{at}.bias", (outputs,))


def layer_norm(read: Read, at: str, width: int) -> Params:
    """Read an `nn.LayerNorm`."""
    return {"gain": read(f"{at}.weight", (width,)), "bias": read(f"{at}.bias", (width,))}


def attention(inner: Sequence[Linear], output: Linear, heads: int) -> Params:
    """Return parameters of query, key, value and output, with [D, D] split into [D, N, H]."""
    params: Params = {}
    for name, (matrix, bias) in zip(("query", "key", "value"), inner, strict=True):
        params[name] = matrix.reshape(len(matrix), heads, -1)
        params[f"{name}_bias"] = bias.reshape(heads, -1)
    matrix, bias = output
    return params | {"output": matrix.reshape(heads, -1, len(bias)), "output_bias": bias}


def feed_forward(up: Linear, down: Linear) -> Params:
    """Return parameters of two linear maps: from D to F and back."""
    return {"up": up[0], "up_bias": up[1], "down": down[0], "down_bias": down[1]}


def stacked(layers: list[Params]) -> Params:
    """Stack the weights of layers along a new first axis."""
    return jax.tree.map(lambda *each: np.stack(each), *layers)

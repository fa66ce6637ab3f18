"""Names and shapes of PEFT's LoRA adapters, for the reader and the writer.

A folder has `adapter_config.json` and `adapter_model.safetensors`. PEFT names modules as the model
of `transformers` does, and keeps for each adapted one `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. It adds (alpha / rank) B A to the module's matrix.

One module may hold several matrices of this library, side by side: the queries, keys and values of
GPT-2's `c_attn`. Their updates are written as one of a larger rank: A has the rows of all of them,
and B is block-diagonal. `rank_pattern` and `alpha_pattern` say so to PEFT. In the other direction
each matrix takes A and its own rows of B.
"""

from typing import NamedTuple

from transformer.interop.fields import InteropError
from transformer.interop.strided_copy import Array
from transformer.interop.weight_map import AsIs, Leaf, Linear, Tensor
from transformer.layers.logical_axes import LogicalAxes
from transformer.lora import RANK_AXIS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

ROOT = "base_model.model."
"""Prefix of every name in an adapter's file."""


class Factors(NamedTuple):
    """Update of one module, or of one matrix of it."""

    a: Array  # [rank, inputs]; of one matrix: [*inputs, rank]
    b: Array  # [outputs, rank]; of one matrix: [rank, *outputs]


def leaf_path(leaf: Leaf) -> tuple[str, ...]:
    """Return the tree path of a parameter."""
    return split_path(leaf.path)


def split_path(path: str) -> tuple[str, ...]:
    """Return a tree path as a key of flattened parameters."""
    return tuple(path.split("/"))


def module_name(tensor: Tensor) -> str:
    """Return the name of the module that a tensor belongs to."""
    return tensor.name.rpartition(".")[0]


def is_input_first(tensor: Tensor) -> bool:
    """Return True for a matrix [inputs, outputs] (GPT-2's `Conv1D`)."""
    return isinstance(tensor.layout, Linear) and not tensor.layout.transposed


def check_module(tensor: Tensor) -> None:
    """Raise InteropError for a matrix that is not a separate module in transformers."""
    axes = tensor.leaves[0].axes
    if axes.stack != ("layers",) or len(tensor.indices) != 1 or isinstance(tensor.layout, AsIs):
        raise InteropError(
            f"{tensor.leaves[0].path}: is not a separate linear layer in transformers, and "
            "PEFT adapts only those; merge the adapter and export the whole model"
        )


def outputs_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the output axes of a matrix."""
    return leaf.unit_shape[len(leaf.axes.inputs) :]


def factor_leaf(leaf: Leaf, rank: int) -> Leaf:
    """Return B of a matrix as a leaf: the rank takes the place of the inputs."""
    shape = (*leaf.shape[: leaf.num_stacked], rank, *outputs_shape(leaf))
    axes = LogicalAxes(leaf.axes.stack, (RANK_AXIS,), leaf.axes.outputs)
    return leaf._replace(axes=axes, shape=shape, padded_shape=shape)

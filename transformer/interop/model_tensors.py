"""Tensors of a model's files in Hugging Face's layout, from its parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from transformer.interop.family import Architecture, Family
from transformer.interop.fields import InteropError
from transformer.interop.strided_copy import Array
from transformer.interop.weight_map import Leaf, Tensor, expand
from transformer.models.model import Model
from transformer.parameter_counts import abstract_parameters


def model_leaves(model: Model) -> dict[str, Leaf]:
    """Return the parameters of a model by path."""
    config = model.config
    leaves = {}
    for parameter in abstract_parameters(model).leaves():
        path = "/".join(parameter.path)
        size = config.source_vocab_size if path == "source_embedding" else config.vocab_size
        cut = tuple(
            size if name == "vocab" else length
            for name, length in zip(parameter.axes.names, parameter.shape, strict=True)
        )
        leaves[path] = Leaf(path, parameter.axes, cut, parameter.shape)
    return leaves


def model_tensors(
    family: Family, architecture: Architecture, model: Model, leaves: Mapping[str, Leaf]
) -> list[Tensor]:
    """Return the tensors of a model's files."""
    config = model.config
    depths = {"layers": (config.num_layers, len(config.layer_pattern))}
    if config.encoder is not None:
        encoder = config.encoder
        depths = {
            "encoder/layers": (encoder.num_layers, len(encoder.layer_pattern)),
            "decoder/layers": depths["layers"],
        }
    return expand((*family.weights, *architecture.head), leaves, depths)


def tensor_values(tensors: list[Tensor], params: Any) -> dict[str, Array]:
    """Return the values of each tensor, by name, of parameters or of their gradients.

    Raises:
      InteropError: Layers that share a tensor have different values.
    """
    arrays = arrays_by_path(params)
    return {name: join_tensor(each, arrays) for name, each in group_by_name(tensors).items()}


def group_by_name(tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return the tensors by name: several entries of one name share its values."""
    by_name: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    return by_name


def join_tensor(tensors: list[Tensor], arrays: Mapping[str, Any]) -> Array:
    """Return the values of one tensor from the parameters that it holds."""
    results = []
    for tensor in tensors:
        for index in tensor.indices:
            units = [
                np.asarray(arrays[leaf.path][index])[tuple(map(slice, leaf.shape[len(index) :]))]
                for leaf in tensor.leaves
            ]
            results.append(tensor.layout.join(units, tensor.leaves))
    first = results[0]
    if any(not np.array_equal(first, other) for other in results[1:]):
        raise InteropError(
            f"{tensors[0].name}: is one tensor for all layers in transformers, and the layers "
            "of this model have different values; it cannot be exported"
        )
    return first


def arrays_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Return the leaves of nested dicts by path, such as `layers/place_0/mixer/query`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}

"""Rules that relate tensors of Hugging Face files to parameters of this library, and their results.

A `Weight` names a tensor, the parameters that it holds, and a layout: how the values of the
parameters are arranged in the tensor. A layout is written once and used in both directions. All of
them move values alone (transposition, splits, reshapes), most as views, so values survive a round
trip bit for bit.

Names are templates: `{layer}` is the number of a layer and `{index}` that of an expert or head. A
parameter below `layers/` stands for one layer: `layers/mixer/query` is layer l of
`layers/place_p/mixer/query`, at index l // P of place p = l % P.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer.interop.fields import InteropError
from transformer.layers.logical_axes import LogicalAxes
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.models.model import Model
from transformer.parameter_counts import abstract_parameters

Array = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """One parameter: a leaf of the parameter tree, without the padding of the vocabulary."""

    path: str
    axes: LogicalAxes
    shape: tuple[int, ...]
    """Shape with the axis of the vocabulary cut to V."""
    padded_shape: tuple[int, ...]
    """Shape in the parameter tree."""

    @property
    def num_stacked(self) -> int:
        """Number of leading axes of layers and experts."""
        return len(self.axes.stack)

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of the values of one layer (and expert)."""
        return self.shape[self.num_stacked :]

    @property
    def inputs(self) -> int:
        """Entries of the input axes; 1 for a vector."""
        return math.prod(self.unit_shape[: len(self.axes.inputs)])

    @property
    def outputs(self) -> int:
        """Entries of the output axes."""
        return math.prod(self.unit_shape[len(self.axes.inputs) :])


@dataclasses.dataclass(frozen=True)
class Linear:
    """Matrices side by side along their outputs; vectors (biases, gains) one after the other."""

    transposed: bool = True
    """The tensor is [outputs, inputs], as in `torch.nn.Linear`; else [inputs, outputs]."""

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        outputs = sum(leaf.outputs for leaf in leaves)
        if not leaves[0].axes.inputs:
            return (outputs,)
        inputs = leaves[0].inputs
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf, as views of the tensor."""
        if tensor.ndim == 2 and self.transposed:
            tensor = tensor.T
        ends = list(itertools.accumulate(leaf.outputs for leaf in leaves))[:-1]
        parts = np.split(tensor, ends, axis=-1)
        return [part.reshape(leaf.unit_shape) for part, leaf in zip(parts, leaves, strict=True)]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        if not leaves[0].axes.inputs:
            return np.concatenate([value.reshape(-1) for value in values])
        flat = [
            value.reshape(leaf.inputs, leaf.outputs)
            for value, leaf in zip(values, leaves, strict=True)
        ]
        joined = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)
        return joined.T if self.transposed else joined


@dataclasses.dataclass(frozen=True)
class HeadsInterleaved:
    """Outputs of several parameters by groups of heads: those of the first group, then the next.

    There are as many groups as the parameter with the fewest heads has: queries of a key-value
    head, its key and its value, then those of the next.
    """

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return Linear().shape(leaves)

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf."""
        num_groups = self._num_groups(leaves)
        ends = list(itertools.accumulate(leaf.outputs // num_groups for leaf in leaves))
        groups = tensor.reshape(num_groups, ends[-1], -1)  # last axis: D, or 1 of a bias
        # Copied: the axes of groups and of heads within a group are not one of the tensor.
        parts = (part.reshape(-1, part.shape[-1]) for part in np.split(groups, ends[:-1], axis=1))
        return [part.T.reshape(leaf.unit_shape) for part, leaf in zip(parts, leaves, strict=True)]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        num_groups = self._num_groups(leaves)
        parts = [
            value.reshape(leaf.inputs, num_groups, -1)
            for value, leaf in zip(values, leaves, strict=True)
        ]
        return np.moveaxis(np.concatenate(parts, axis=2), 0, -1).reshape(self.shape(leaves))

    def _num_groups(self, leaves: Sequence[Leaf]) -> int:
        return min(leaf.unit_shape[len(leaf.axes.inputs)] for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Depthwise:
    """Taps [k, heads, width] of convolutions, channels one after the other: [channels, 1, k]."""

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        kernel_size = leaves[0].unit_shape[0]
        return (sum(leaf.outputs for leaf in leaves) // kernel_size, 1, kernel_size)

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf, as views of the tensor."""
        kernel_size = leaves[0].unit_shape[0]
        ends = list(itertools.accumulate(leaf.outputs // kernel_size for leaf in leaves))[:-1]
        parts = np.split(tensor[:, 0].T, ends, axis=1)
        return [part.reshape(leaf.unit_shape) for part, leaf in zip(parts, leaves, strict=True)]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        channels = [value.reshape(value.shape[0], -1) for value in values]
        return np.concatenate(channels, axis=1).T[:, None]


@dataclasses.dataclass(frozen=True)
class AsIs:
    """The values in the shape of the parameter, with leading axes of size 1 if asked for."""

    leading: int = 0

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return (1,) * self.leading + leaves[0].unit_shape

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of the leaf."""
        return [tensor.reshape(leaves[0].unit_shape)]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        return values[0].reshape(self.shape(leaves))


@dataclasses.dataclass(frozen=True)
class WholeStack:
    """All experts (or heads) of a layer: [E, inputs, outputs], or [E, outputs] of biases and gains.

    The outputs of several parameters alternate: first of the first, first of the second, ...
    """

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        *first, outputs = leaves[0].shape[1:]
        return (*first, outputs * len(leaves))

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf, as views of the tensor."""
        return [tensor[..., number :: len(leaves)] for number in range(len(leaves))]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        return np.stack(values, axis=-1).reshape(self.shape(leaves))


Layout = Linear | HeadsInterleaved | Depthwise | AsIs | WholeStack

LINEAR = Linear()
TABLE = Linear(transposed=False)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One rule: a tensor, the parameters that it holds, and their arrangement."""

    theirs: str
    ours: str | tuple[str, ...]
    layout: Layout = LINEAR
    beside: str = ""
    """Path of another parameter: the rule holds only where the model has that one too."""
    without: str = ""
    """Path of another parameter: the rule holds only where the model lacks that one."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters, as templates."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model's files, with the places of its values in the parameter tree."""

    name: str
    leaves: tuple[Leaf, ...]
    index: tuple[int, ...]
    """Index of the stack axes (layer, expert or head) at which the tensor's values stand. A tensor
    of all experts has the layer alone."""
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Expected shape."""
        return self.layout.shape(self.leaves)

    def join(self, arrays: Mapping[str, Any]) -> Array:
        """Return the values from the parameters (or gradients) by path."""
        units = [
            np.asarray(arrays[leaf.path][self.index])[
                tuple(map(slice, leaf.shape[len(self.index) :]))
            ]
            for leaf in self.leaves
        ]
        return self.layout.join(units, self.leaves)


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts by path, such as `layers/place_0/mixer/query`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def model_leaves(model: Model) -> dict[str, Leaf]:
    """Return the parameters of a model by path."""
    config = model.config
    leaves = {}
    for parameter in abstract_parameters(model).leaves():
        path = "/".join(parameter.path)
        size = config.source_vocab_size if path == "source_embedding" else config.vocab_size
        shape = tuple(
            size if name == "vocab" else length
            for name, length in zip(parameter.axes.names, parameter.shape, strict=True)
        )
        leaves[path] = Leaf(path, parameter.axes, shape, parameter.shape)
    return leaves


def model_tensors(
    weights: Sequence[Weight], leaves: Mapping[str, Leaf], config: TransformerConfig
) -> dict[str, Tensor]:
    """Return every tensor of a model's files by name.

    Rules whose parameters the model does not have (biases that are off, an untied output matrix)
    give no tensor.

    Args:
      weights: Rules of the family and of the head.
      leaves: Parameters by path.
      config: Config of the model.

    Raises:
      InteropError: A parameter is in no rule: the files have no place for it.
    """
    tensors = {
        tensor.name: tensor for weight in weights for tensor in _expand(weight, leaves, config)
    }
    covered = {(leaf.path, tensor.index) for tensor in tensors.values() for leaf in tensor.leaves}
    for leaf in leaves.values():
        for index in np.ndindex(leaf.shape[: leaf.num_stacked]):
            # A tensor may hold all experts of a layer.
            if not {(leaf.path, index), (leaf.path, index[:1])} & covered:
                raise InteropError(
                    f"parameter {leaf.path}: the files of this architecture have no place for it; "
                    "leave out the setting that adds it"
                )
    return tensors


def _expand(
    weight: Weight, leaves: Mapping[str, Leaf], config: TransformerConfig
) -> Iterator[Tensor]:
    """Yield the tensors of a rule."""
    stack, num_layers, num_places = _stack_of(weight, config)
    for layer in range(num_layers):
        prefix = f"{stack}place_{layer % num_places}/" if stack else ""
        index = (layer // num_places,) if stack else ()
        paths = [prefix + path.removeprefix(stack) for path in weight.paths]
        if not all(path in leaves for path in paths):
            continue
        # The other path stands in the same layer as the rule's own.
        if weight.beside and prefix + weight.beside.removeprefix(stack) not in leaves:
            continue
        if weight.without and prefix + weight.without.removeprefix(stack) in leaves:
            continue
        held = tuple(leaves[path] for path in paths)
        # The number of experts, or of heads with gains of their own, if any.
        inner = held[0].shape[len(index) : held[0].num_stacked]
        if len(inner) != ("{index}" in weight.theirs or isinstance(weight.layout, WholeStack)):
            continue
        if "{index}" in weight.theirs:
            for number in range(inner[0]):
                name = weight.theirs.format(layer=layer, index=number)
                yield Tensor(name, held, (*index, number), weight.layout)
        else:
            yield Tensor(weight.theirs.format(layer=layer), held, index, weight.layout)


def _stack_of(weight: Weight, config: TransformerConfig) -> tuple[str, int, int]:
    """Return the tree path of a rule's layers, their number and that of the places.

    A rule outside of the layers has one tensor: the path is empty, and the numbers are 1.
    """
    stacks: dict[str, TransformerConfig | EncoderConfig | None] = {
        "layers/": config,
        "decoder/layers/": config,
        "encoder/layers/": config.encoder,
    }
    for path, side in stacks.items():
        if side is not None and weight.paths[0].startswith(path):
            num_places = len(side.layer_pattern)
            return path, num_places if config.share_layers else side.num_layers, num_places
    return "", 1, 1

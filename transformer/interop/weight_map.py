"""Rules that relate tensors of Hugging Face files to parameters of this library.

A `Weight` names a tensor, the parameters that it holds, and a layout: how the values of the
parameters are arranged in the tensor. A layout is written once and used in both directions. All of
them are views (transposition, splits, reshapes), so values survive a round trip bit for bit.

Names are templates: `{layer}` is the number of a layer and `{expert}` that of an expert. A
parameter below `layers/` stands for one layer: `layers/mixer/query` is layer l of
`layers/place_p/mixer/query`, at index l // P of place p = l % P.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer.interop.fields import InteropError
from transformer.layers.logical_axes import LogicalAxes

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
    """Queries, keys and values of a head, then those of the next: [N, 3, H, D] as one matrix."""

    def shape(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return Linear().shape(leaves)

    def split(self, tensor: Array, leaves: Sequence[Leaf]) -> list[Array]:
        """Return the values of each leaf, as views of the tensor."""
        heads, head_dim = leaves[0].unit_shape[-2:]
        by_head = tensor.reshape(heads, len(leaves), head_dim, -1)  # last axis: D, or 1 of a bias
        parts = (np.moveaxis(by_head[:, index], -1, 0) for index in range(len(leaves)))
        return [
            part if leaf.axes.inputs else part[0] for part, leaf in zip(parts, leaves, strict=True)
        ]

    def join(self, values: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
        """Return the tensor that `split` takes apart."""
        stacked = np.stack([value.reshape(-1, *value.shape[-2:]) for value in values])
        by_head = np.moveaxis(stacked, (0, 1), (1, 3))  # [3, D, N, H] -> [N, 3, H, D]
        return by_head.reshape(self.shape(leaves))


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
class AllExperts:
    """All experts of a layer: [E, inputs, outputs], or [E, outputs] for biases.

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


Layout = Linear | HeadsInterleaved | AsIs | AllExperts

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


class Tensor(NamedTuple):
    """One tensor of a model's files, with the places of its values in the parameter tree."""

    name: str
    leaves: tuple[Leaf, ...]
    indices: tuple[tuple[int, ...], ...]
    """Indices of the stack axes (layer, expert) at which the tensor's values stand. More than one
    if layers share the tensor. A tensor of all experts has the layer alone."""
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Expected shape."""
        return self.layout.shape(self.leaves)


def expand(
    weights: Sequence[Weight],
    leaves: Mapping[str, Leaf],
    depths: Mapping[str, tuple[int, int]],
) -> list[Tensor]:
    """Return every tensor of a model.

    Rules whose parameters the model does not have (biases that are off, an untied output matrix)
    give no tensor.

    Args:
      weights: Rules of the family.
      leaves: Parameters by path.
      depths: Number of layers and of places of each stack, by its path (`layers`,
        `encoder/layers`).

    Raises:
      InteropError: A parameter is in no rule: the family's files have no place for it.
    """
    tensors: list[Tensor] = []
    covered: set[tuple[str, tuple[int, ...]]] = set()
    for weight in weights:
        by_name: dict[str, list[tuple[tuple[Leaf, ...], tuple[int, ...]]]] = {}
        for layer, expert, paths in _instances(weight, depths):
            present_leaves = tuple(leaves[path] for path, _ in paths if path in leaves)
            if len(present_leaves) != len(paths):
                continue
            # The other path stands in the same layer as the rule's own.
            own, stack = weight.paths[0], paths[0][0]
            layer_path = stack.removesuffix(_below_layer(own))
            if weight.beside and layer_path + _below_layer(weight.beside) not in leaves:
                continue
            if weight.without and layer_path + _below_layer(weight.without) in leaves:
                continue
            index = (
                *((paths[0][1],) if layer is not None else ()),
                *([expert] if expert is not None else ()),
            )
            if (
                expert is not None
                and expert >= present_leaves[0].shape[present_leaves[0].num_stacked - 1]
            ):
                continue
            num_inside = isinstance(weight.layout, AllExperts)  # stack axes within the tensor
            if len(index) + num_inside != present_leaves[0].num_stacked:
                continue
            name = weight.theirs.format(layer=layer, expert=expert)
            by_name.setdefault(name, []).append((present_leaves, index))
            experts = range(present_leaves[0].shape[len(index)]) if num_inside else [None]
            for leaf, inside in itertools.product(present_leaves, experts):
                covered.add((leaf.path, index if inside is None else (*index, inside)))
        for name, places in by_name.items():
            # Layers that share a tensor may be of several places: one entry for each leaf.
            for present_leaves in dict.fromkeys(leaves_ for leaves_, _ in places):
                indices = tuple(index for leaves_, index in places if leaves_ == present_leaves)
                tensors.append(Tensor(name, present_leaves, indices, weight.layout))
    for leaf in leaves.values():
        for index in itertools.product(*map(range, leaf.shape[: leaf.num_stacked])):
            if (leaf.path, index) not in covered:
                raise InteropError(
                    f"parameter {leaf.path}: the files of this architecture have no place for it; "
                    "leave out the setting that adds it"
                )
    return tensors


def _below_layer(path: str) -> str:
    """Return the part of a template after `layers`."""
    return path[path.index("layers/") + len("layers") :] if "layers/" in path else path


MAX_EXPERTS = 1024
"""Bound of the search for experts; a model's own number cuts it."""


def _instances(
    weight: Weight, depths: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int | None, int | None, list[tuple[str, int]]]]:
    """Yield (layer, expert, [(path, index of the layer in its place)]) of a rule."""
    stack = next(
        (stack for stack in depths if all(p.startswith(f"{stack}/") for p in weight.paths)), None
    )
    experts: list[int | None] = [None]
    if "{expert}" in weight.theirs:
        experts = list(range(MAX_EXPERTS))
    if stack is None:
        for expert in experts:
            yield None, expert, [(path, 0) for path in weight.paths]
        return
    num_layers, num_places = depths[stack]
    for layer in range(num_layers):
        place, index = layer % num_places, layer // num_places
        paths = [
            (f"{stack}/place_{place}{path.removeprefix(stack)}", index) for path in weight.paths
        ]
        for expert in experts:
            yield layer, expert, paths

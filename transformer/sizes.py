"""How large a model is: counted from the shapes and axes of the real one, nothing allocated."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention import AttentionConfig
from transformer.config import TransformerConfig
from transformer.mixers import MixerConfig
from transformer.model import LanguageModel
from transformer.weights import Axes


class Leaf(NamedTuple):
    """One parameter: where it is, and what would be allocated for it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    axes: Axes

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def inputs(self) -> int:
        """How many entries a product with this matrix sums over: its fan-in."""
        stack = len(self.axes.stack)
        return math.prod(self.shape[stack : stack + len(self.axes.inputs)])


class Abstract(NamedTuple):
    """A model's parameters without their values."""

    shapes: Any  # a tree of jax.ShapeDtypeStruct
    axes: Any  # the like tree of Axes

    def leaves(self) -> Iterator[Leaf]:
        axes = jax.tree.leaves(self.axes, is_leaf=lambda leaf: isinstance(leaf, Axes))
        shapes = jax.tree_util.tree_leaves_with_path(self.shapes)
        for (path, shape), names in zip(shapes, axes, strict=True):
            keys = tuple(key.key for key in path)
            yield Leaf(keys, shape.shape, shape.size * shape.dtype.itemsize, names)


@functools.lru_cache(maxsize=8)
def abstract(model: LanguageModel) -> Abstract:
    """What `model.init` would make. Raises ValueError for a model without a vocabulary."""
    config = model.config
    if not config.vocab_size:
        raise ValueError("model.vocab_size 0: stands for the tokenizer's; give a number")
    # The same weights, with one layer to trace and no kernel that only its own hardware knows.
    scanned = LanguageModel(dataclasses.replace(config, loop="scan"))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), tokens)["params"]
    return Abstract(shapes, scanned.axes())


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    parts: Mapping[str, int]
    """By part, without padding."""
    padding: int
    """In rows of the embedding that stand for no word."""

    @property
    def total(self) -> int:
        """What is published of a model: without padding."""
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        return self.total + self.padding


def count_parameters(model: LanguageModel) -> Parameters:
    """Exact counts, by part."""
    parts = dict.fromkeys(("embedding", "positions"), 0)
    parts |= {_mixer_part(block.mixer): 0 for block in model.config.pattern}
    parts |= dict.fromkeys(("feed_forward", "norms", "output"), 0)
    padding = 0
    for leaf in abstract(model).leaves():
        padded = padded_entries(leaf, model.config)
        part = _part(leaf.path, model.config)
        parts[part] = parts.get(part, 0) + leaf.size - padded
        padding += padded
    return Parameters(parts, padding)


def estimate_parameters(config: TransformerConfig) -> int:
    """The textbook's 12 L D^2 + V D: four D x D projections, a feed-forward of width 4 D."""
    return 12 * config.layers * config.width**2 + config.vocab_size * config.width


def layer_mixers(config: TransformerConfig) -> Iterator[MixerConfig]:
    """The mixer of each of the L layers."""
    for layer in range(config.layers):
        yield config.pattern[layer % len(config.pattern)].mixer


def cache_bytes(model: LanguageModel, length: int) -> int:
    """Size of one example's cache for `length` tokens."""
    cache = jax.eval_shape(lambda: model.init_cache(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def padded_entries(leaf: Leaf, config: TransformerConfig) -> int:
    """How many entries of a parameter stand for words that are not there."""
    if "vocab" not in leaf.axes.names:
        return 0
    return leaf.size // config.vocab_rows * (config.vocab_rows - config.vocab_size)


def _mixer_part(mixer: MixerConfig) -> str:
    return "attention" if isinstance(mixer, AttentionConfig) else mixer.kind


def _part(path: tuple[str, ...], config: TransformerConfig) -> str:
    """Which part the parameter at `path` belongs to."""
    if any(name.endswith("norm") for name in path):
        return "norms"
    if path[0] != "layers":
        return path[0]
    _, place, module, *_ = path
    return (
        _mixer_part(config.pattern[int(place.removeprefix("place_"))].mixer)
        if module == "mixer"
        else module
    )

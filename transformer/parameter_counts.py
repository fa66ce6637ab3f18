"""How large a model is: counted from the shapes and axes of the real one, nothing allocated."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from transformer.attention.backends.choose import BackendChoice, choose_backend
from transformer.attention.config import AttentionConfig, MixerConfig
from transformer.config import BlockConfig, TransformerConfig
from transformer.hardware import Hardware
from transformer.layers.config import MoEConfig
from transformer.layers.logical_axes import LogicalAxes
from transformer.models.base import Model
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel

ENCODER_DECODER_SIDES = ("encoder", "decoder")
"""Of an encoder-decoder, as its parameters are called."""


class ParameterLeaf(NamedTuple):
    """One parameter: where it is, and what would be allocated for it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    num_bytes: int
    axes: LogicalAxes

    @property
    def path_in_side(self) -> tuple[str, ...]:
        """The path without the side of an encoder-decoder: where it is within its stack."""
        return self.path[1:] if self.path[0] in ENCODER_DECODER_SIDES else self.path

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """How many entries a product with this matrix sums over: its fan-in."""
        stack = len(self.axes.stack)
        return math.prod(self.shape[stack : stack + len(self.axes.inputs)])


class AbstractParameters(NamedTuple):
    """A model's parameters without their values."""

    shapes: Any  # a tree of jax.ShapeDtypeStruct
    axes: Any  # the like tree of Axes

    def leaves(self) -> Iterator[ParameterLeaf]:
        axes = jax.tree.leaves(self.axes, is_leaf=lambda leaf: isinstance(leaf, LogicalAxes))
        shapes = jax.tree_util.tree_leaves_with_path(self.shapes)
        for (path, shape), names in zip(shapes, axes, strict=True):
            keys = tuple(key.key for key in path)
            yield ParameterLeaf(keys, shape.shape, shape.size * shape.dtype.itemsize, names)


@functools.lru_cache(maxsize=8)
def abstract_parameters(model: Model) -> AbstractParameters:
    """What `model.init` would make. Raises ValueError for a model without a vocabulary."""
    config = model.config
    if not config.vocab_size:
        raise ValueError("model.vocab_size 0: stands for the tokenizer's; give a number")
    # The same weights, with one layer to trace and no kernel that only its own hardware knows.
    scanned = dataclasses.replace(
        model, config=dataclasses.replace(config, layer_loop="scan"), hardware=Hardware()
    )
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), *scanned.example_inputs())["params"]
    return AbstractParameters(shapes, scanned.logical_axes())


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    by_part: Mapping[str, int]
    """By part, without padding."""
    padding: int
    """In rows of the embedding that stand for no word."""
    task_heads: int = 0
    """In what a task puts on top: classes, tags, BERT's masked-word head."""
    inactive: int = 0
    """Those of `total` that a token does not meet: of experts that it is not sent to."""

    @property
    def total(self) -> int:
        """What is published of a model: without padding, and without the heads of tasks."""
        return sum(self.by_part.values())

    @property
    def allocated(self) -> int:
        return self.total + self.padding + self.task_heads

    @property
    def active(self) -> int:
        """What one token goes through."""
        return self.total - self.inactive


def count_parameters(model: Model) -> ParameterCounts:
    """Exact counts, by part."""
    parts = dict.fromkeys(("embedding", "positions"), 0)
    parts |= {_mixer_part(layer.mixer, layer.cross): 0 for layer in layer_mixers(model.config)}
    parts |= dict.fromkeys(("feed_forward", "norms", "output"), 0)
    padding = heads = idle = 0
    for leaf in abstract_parameters(model).leaves():
        padded = count_padding_entries(leaf, model.config)
        padding += padded
        idle += leaf.size - count_active_entries(leaf, model.config)
        if leaf.path[0].startswith("head"):
            heads += leaf.size - padded
            continue
        part = _part(leaf, model.config)
        parts[part] = parts.get(part, 0) + leaf.size - padded
    return ParameterCounts(parts, padding, heads, idle)


def estimate_parameters(config: TransformerConfig) -> int:
    """The textbook's 12 L D^2 + V D: four D x D projections, a feed-forward of width 4 D.

    An encoder adds as much for each of its layers, and cross attention 4 D^2 for each of the
    decoder's.
    """
    blocks = 12 * config.num_layers
    if config.encoder is not None:
        blocks += 12 * config.encoder.num_layers + 4 * config.num_layers
    return blocks * config.d_model**2 + config.vocab_size * config.d_model


class LayerMixer(NamedTuple):
    """A mixer at its place in a model."""

    mixer: MixerConfig
    causal: bool
    """Whether it sees only what came before."""
    cross: bool = False
    """Whether it looks at the encoder's output."""

    def backend_choice(
        self,
        config: TransformerConfig,
        length: int,  # T, and S
        *,
        hardware: Hardware,
        segments: bool,
        context_shards: int = 1,  # devices that the tokens are spread over
        mesh_known: bool = True,  # whether it is known how arrays lie on several devices
    ) -> BackendChoice | None:
        """The form that its attention takes in training, and why; None of other mixers."""
        if not isinstance(self.mixer, AttentionConfig):
            return None
        case = self.mixer.attention_spec(
            config.d_model,
            length,
            dtype=config.precision.compute,
            hardware=hardware,
            causal=self.causal,
            segments=segments,
            cross=self.cross,
            context_shards=context_shards,
            mesh_known=mesh_known,
        )
        return choose_backend(self.mixer.backend, case)


def layer_mixers(config: TransformerConfig) -> Iterator[LayerMixer]:
    """The mixers of all layers: an encoder's first."""
    if config.encoder is not None:
        for block in _blocks(config.encoder.layer_pattern, config.encoder.num_layers):
            yield LayerMixer(block.mixer, causal=False)
    for block in _blocks(config.layer_pattern, config.num_layers):
        yield LayerMixer(block.mixer, causal=config.causal)
        if block.cross_attention is not None:
            yield LayerMixer(block.cross_attention, causal=False, cross=True)


def _blocks(pattern: tuple[BlockConfig, ...], layers: int) -> Iterator[BlockConfig]:
    return (pattern[layer % len(pattern)] for layer in range(layers))


def cache_bytes(model: LanguageModel | EncoderDecoder, length: int, source_length: int = 0) -> int:
    """Size of one example's cache for `length` tokens, and a source of `source_length` if it has one."""
    lengths = (length, source_length) if isinstance(model, EncoderDecoder) else (length,)
    cache = jax.eval_shape(lambda: model.init_cache(1, *lengths))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def count_padding_entries(leaf: ParameterLeaf, config: TransformerConfig) -> int:
    """How many entries of a parameter stand for words that are not there."""
    if "vocab" not in leaf.axes.names:
        return 0
    words = config.source_vocab_size if leaf.path[0] == "source_embedding" else config.vocab_size
    rows = config.pad_vocab_size(words)
    return leaf.size // rows * (rows - words)


def count_active_entries(leaf: ParameterLeaf, config: TransformerConfig) -> int:
    """How many entries of a parameter a token meets: of experts, those of the chosen ones."""
    if "experts" not in leaf.axes.stack:
        return leaf.size
    mixture = _block(leaf, config).feed_forward
    assert isinstance(mixture, MoEConfig)  # nothing else has experts
    return leaf.size // mixture.num_experts * mixture.num_experts_per_token


def _mixer_part(mixer: MixerConfig, cross: bool) -> str:
    name = "attention" if isinstance(mixer, AttentionConfig) else mixer.kind
    return f"cross_{name}" if cross else name


def _part(leaf: ParameterLeaf, config: TransformerConfig) -> str:
    """Which part a parameter belongs to."""
    if any(name.endswith("norm") for name in leaf.path):
        return "norms"
    if leaf.path_in_side[0] != "layers":
        return leaf.path_in_side[0].removesuffix("_bias")
    block, module = _block(leaf, config), leaf.path_in_side[2]
    if module == "cross" and block.cross_attention is not None:
        return _mixer_part(block.cross_attention, cross=True)
    return _mixer_part(block.mixer, cross=False) if module == "mixer" else module


def _block(leaf: ParameterLeaf, config: TransformerConfig) -> BlockConfig:
    """The place of the pattern that a layer's parameter belongs to."""
    pattern = config.layer_pattern
    if leaf.path[0] == "encoder" and config.encoder is not None:
        pattern = config.encoder.layer_pattern
    return pattern[int(leaf.path_in_side[1].removeprefix("place_"))]

"""Parameter counts of a model, from the shapes of its real parameters; nothing is allocated."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from transformer.attention.backends.choose import BackendChoice, choose_backend
from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
from transformer.hardware import Hardware
from transformer.layers.logical_axes import LogicalAxes, abstract_weights
from transformer.layers.moe import MoEConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.language_model import LanguageModel
from transformer.models.model import Model
from transformer.quantization import Quantization, quantize_weights

ENCODER_DECODER_SIDES = ("encoder", "decoder")
"""Top-level names in the parameter tree of an encoder-decoder."""


class ParameterLeaf(NamedTuple):
    """One parameter of a model: its path, shape and size."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    num_bytes: int
    axes: LogicalAxes

    @property
    def path_in_side(self) -> tuple[str, ...]:
        """The path below `encoder` or `decoder`; the whole path in other models."""
        return self.path[1:] if self.path[0] in ENCODER_DECODER_SIDES else self.path

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """Number of entries that a product with this matrix sums over."""
        stack = len(self.axes.stack)
        return math.prod(self.shape[stack : stack + len(self.axes.inputs)])

    @property
    def fan_out(self) -> int:
        """Number of results of a product with this matrix."""
        return math.prod(self.shape[len(self.axes.stack) + len(self.axes.inputs) :])


class AbstractParameters(NamedTuple):
    """A model's parameters without values."""

    shapes: Any  # a tree of jax.ShapeDtypeStruct
    axes: Any  # a tree of LogicalAxes with the same structure

    def leaves(self) -> Iterator[ParameterLeaf]:
        """Yield every parameter."""
        axes = jax.tree.leaves(self.axes, is_leaf=lambda leaf: isinstance(leaf, LogicalAxes))
        shapes = jax.tree_util.tree_leaves_with_path(self.shapes)
        for (path, shape), names in zip(shapes, axes, strict=True):
            keys = tuple(key.key for key in path)
            yield ParameterLeaf(keys, shape.shape, shape.size * shape.dtype.itemsize, names)


@functools.lru_cache(maxsize=8)
def abstract_parameters(model: Model) -> AbstractParameters:
    """Return the shapes and axes of `model.init`.

    Raises:
      ValueError: If the vocabulary size is not set.
    """
    config = model.config
    if not config.vocab_size:
        raise ValueError("model.vocab_size 0: is set from a tokenizer; give a number")
    # Scanned layers trace once, and default hardware needs no kernels, nor takes `remat` `offload`;
    # the weights are the same.
    traced = dataclasses.replace(config, layer_loop="scan", remat="none")
    scanned = dataclasses.replace(model, config=traced, hardware=Hardware())
    return AbstractParameters(
        *abstract_weights(scanned.init, jax.random.key(0), *scanned.example_inputs())
    )


def weight_bytes(model: Model, quantize: Quantization = "none") -> int:
    """Return the bytes of all weights, with the matrices of the layers in few bits."""
    shapes, axes = abstract_parameters(model)
    leaves = jax.tree.leaves(quantize_weights(shapes, axes, quantize))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model."""

    by_part: Mapping[str, int]
    """Parameters of each part (embedding, attention, ...), without padding."""
    padding: int
    """Parameters in embedding rows that pad the vocabulary."""
    task_heads: int = 0
    """Parameters of task heads: classes, tags, BERT's masked-token head."""
    inactive: int = 0
    """Parameters in `total` that a token does not use: experts that it is not sent to."""

    @property
    def total(self) -> int:
        """Parameters as published: without padding and task heads."""
        return sum(self.by_part.values())

    @property
    def allocated(self) -> int:
        """Parameters in memory."""
        return self.total + self.padding + self.task_heads

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.inactive


def count_parameters(model: Model) -> ParameterCounts:
    """Count parameters exactly, by part."""
    parts = dict.fromkeys(("embedding", "positions"), 0)
    parts |= {_mixer_part(layer.mixer, layer.cross): 0 for layer in layer_mixers(model.config)}
    parts |= dict.fromkeys(("feed_forward", "norms", "output"), 0)
    padding = task_heads = inactive = 0
    for leaf in abstract_parameters(model).leaves():
        padded = count_padding_entries(leaf, model.config)
        padding += padded
        inactive += leaf.size - count_active_entries(leaf, model.config)
        if leaf.path[0].startswith("head"):
            task_heads += leaf.size - padded
            continue
        part = _part(leaf, model.config)
        parts[part] = parts.get(part, 0) + leaf.size - padded
    return ParameterCounts(parts, padding, task_heads, inactive)


def estimate_parameters(config: TransformerConfig) -> int:
    """Return the textbook estimate 12 L D^2 + V D: four D x D projections and F = 4 D.

    An encoder adds 12 D^2 for each of its layers, cross-attention 4 D^2 for each decoder layer.
    """
    blocks = 12 * config.num_layers
    if config.encoder is not None:
        blocks += 12 * config.encoder.num_layers + 4 * config.num_layers
    return blocks * config.d_model**2 + config.vocab_size * config.d_model


class LayerMixer(NamedTuple):
    """Mixer of one layer, and its role."""

    mixer: MixerConfig
    causal: bool
    """True if it applies a causal mask."""
    cross: bool = False
    """True if it attends to the encoder's output."""

    def backend_choice(
        self,
        config: TransformerConfig,
        length: int,  # T, and S
        *,
        hardware: Hardware,
        segments: bool,
        context_shards: int = 1,  # shards of the length axis
        mesh_known: bool = True,  # True if activations are constrained to a mesh
    ) -> BackendChoice | None:
        """Return its attention backend in training, and the reason; None for other mixers."""
        if not isinstance(self.mixer, AttentionConfig):
            return None
        spec = self.mixer.attention_spec(
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
        return choose_backend(self.mixer.backend, spec)


def layer_mixers(config: TransformerConfig) -> Iterator[LayerMixer]:
    """Yield the mixers of all layers, the encoder's first."""
    if config.encoder is not None:
        for block in _blocks(config.encoder.layer_pattern, config.encoder.num_layers):
            yield LayerMixer(block.mixer, causal=False)
    for block in _blocks(config.layer_pattern, config.num_layers):
        yield LayerMixer(block.mixer, causal=config.causal)
        if block.cross_attention is not None:
            yield LayerMixer(block.cross_attention, causal=False, cross=True)


def _blocks(pattern: tuple[BlockConfig, ...], num_layers: int) -> Iterator[BlockConfig]:
    return (pattern[index % len(pattern)] for index in range(num_layers))


def cache_bytes(model: LanguageModel | EncoderDecoder, length: int, source_length: int = 0) -> int:
    """Return the bytes of one example's cache of `length` tokens (and a source's memory)."""
    lengths = (length, source_length) if isinstance(model, EncoderDecoder) else (length,)
    cache = jax.eval_shape(lambda: model.init_cache(1, *lengths))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def count_padding_entries(leaf: ParameterLeaf, config: TransformerConfig) -> int:
    """Return the number of entries of a parameter that pad the vocabulary."""
    if "vocab" not in leaf.axes.names:
        return 0
    size = config.source_vocab_size if leaf.path[0] == "source_embedding" else config.vocab_size
    rows = config.pad_vocab_size(size)
    return leaf.size // rows * (rows - size)


def count_active_entries(leaf: ParameterLeaf, config: TransformerConfig) -> int:
    """Return the number of entries of a parameter that one token uses."""
    if "experts" not in leaf.axes.stack:
        return leaf.size
    mixture = _block(leaf, config).feed_forward
    assert isinstance(mixture, MoEConfig)  # no other module has experts
    return leaf.size // mixture.num_experts * mixture.num_experts_per_token


def count_uses(leaf: ParameterLeaf, config: TransformerConfig) -> int:
    """Return how many layers use a parameter that they share; 1 for all others."""
    if not config.share_layers or leaf.path_in_side[0] != "layers":
        return 1
    side = config.encoder if leaf.path[0] == "encoder" and config.encoder else config
    return len(range(_place(leaf), side.num_layers, len(side.layer_pattern)))


def _mixer_part(mixer: MixerConfig, cross: bool) -> str:
    name = "attention" if isinstance(mixer, AttentionConfig) else mixer.kind
    return f"cross_{name}" if cross else name


def _part(leaf: ParameterLeaf, config: TransformerConfig) -> str:
    """Return the part that a parameter belongs to."""
    if any(name.endswith("norm") for name in leaf.path):
        return "norms"
    if leaf.path_in_side[0] != "layers":
        return leaf.path_in_side[0].removesuffix("_bias")
    block, module = _block(leaf, config), leaf.path_in_side[2]
    if module == "cross" and block.cross_attention is not None:
        return _mixer_part(block.cross_attention, cross=True)
    return _mixer_part(block.mixer, cross=False) if module == "mixer" else module


def _block(leaf: ParameterLeaf, config: TransformerConfig) -> BlockConfig:
    """Return the block configuration of a layer's parameter."""
    pattern = config.layer_pattern
    if leaf.path[0] == "encoder" and config.encoder is not None:
        pattern = config.encoder.layer_pattern
    return pattern[_place(leaf)]


def _place(leaf: ParameterLeaf) -> int:
    return int(leaf.path_in_side[1].removeprefix("place_"))

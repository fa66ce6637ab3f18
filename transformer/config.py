"""How weights start. Imports nothing that computes.

Settings of a layer. Imports nothing that computes.

The configuration of a whole model: frozen, and checked when it is built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformer.validation import check_at_least

if TYPE_CHECKING:
    import jax
from typing import Literal, get_args

from transformer.attention.config import AttentionConfig, MixerConfig
from transformer.attention.position_config import LearnedPositions, NoPosition, PositionEmbedding
from transformer.layers.config import FeedForwardConfig, MoEConfig, NormConfig
from transformer.precision import Precision
from transformer.validation import check_choice, check_fraction, check_numbers

Initializer = Callable[["jax.Array", tuple[int, ...], Any], "jax.Array"]


@dataclasses.dataclass(frozen=True)
class Initialization:
    """How weights start: normal, with one standard deviation for all or by fan-in."""

    std: float = 0.02
    """Standard deviation of every matrix; 0 means 1/sqrt(fan-in), which suits any width."""
    embedding_std: float = 0.02
    """Standard deviation of token and position tables."""
    depth_scaled: bool = True
    """Divide what is added to the residual stream by sqrt(2 L), as GPT-2 does."""

    def __post_init__(self) -> None:
        check_at_least("initialization.std", self.std, 0)
        check_at_least("initialization.embedding_std", self.embedding_std, 0)

    def matrix_initializer(
        self, inputs: Mapping[str, int], *, num_residual_layers: int = 0
    ) -> Initializer:
        """For a matrix; `num_residual_layers` = L if its result is added to the residual stream."""
        from flax import linen as nn

        std = self.std or 1 / math.sqrt(math.prod(inputs.values()))
        if self.depth_scaled and num_residual_layers:
            std /= math.sqrt(2 * num_residual_layers)
        return nn.initializers.normal(std)

    def embedding_initializer(self) -> Initializer:
        from flax import linen as nn

        return nn.initializers.normal(self.embedding_std)


NormPlacement = Literal["pre", "post", "sandwich"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One place of the layer pattern."""

    mixer: MixerConfig = AttentionConfig()
    """What moves information between tokens."""
    cross_attention: MixerConfig | None = None
    """What brings information in from the memory (the encoder's output), after the mixer."""
    feed_forward: FeedForwardConfig | MoEConfig | None = FeedForwardConfig()
    norm: NormConfig | None = NormConfig()
    norm_placement: NormPlacement = "pre"
    """x + f(norm(x)); norm(x + f(x)) as in Vaswani et al. 2017; or x + norm(f(norm(x))) as in
    Ding et al. 2021."""
    residual: bool = True
    """Whether x is added to f(x). Without it deep stacks hardly learn: it is here to be shown."""
    residual_dropout: float = 0.0
    """Of what is added to the residual stream."""

    def __post_init__(self) -> None:
        check_choice("block.norm_placement", self.norm_placement, get_args(NormPlacement))
        check_fraction("block.residual_dropout", self.residual_dropout)

    @property
    def needs_memory(self) -> bool:
        """Whether a layer of this kind works only with the output of an encoder."""
        return self.cross_attention is not None or self.mixer.reads_memory


LayerLoop = Literal["auto", "scan", "unroll"]


RematPolicy = Literal["none", "dots", "full", "offload"]


Pooling = Literal["first", "mean"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder-decoder. Width, positions and precision are the model's."""

    num_layers: int = 6
    """L of the encoder."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Layer i is pattern[i mod P]."""
    final_norm: NormConfig | None = NormConfig()
    """The norm of the encoder's output: pre-norm stacks need one, post-norm stacks have it."""
    vocab_size: int = 0
    """V of the source; 0: it has the words of the target, and both have one table."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A stack of layers over embedded tokens."""

    vocab_size: int = 0
    """V; 0 means as many as the run's tokenizer has."""
    d_model: int = 512
    """D."""
    num_layers: int = 6
    """L."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Layer i is pattern[i mod P]."""
    position_embedding: PositionEmbedding = NoPosition()
    """What is added to the embeddings to tell positions."""
    scale_embeddings: bool = False
    """Whether words' vectors are multiplied by sqrt(D) (Vaswani et al. 2017, section 3.4)."""
    embedding_norm: NormConfig | None = None
    """The norm of the embeddings, as BERT has it."""
    num_token_types: int = 0
    """Rows of a table that tells kinds of tokens apart, such as BERT's two sentences; 0: none."""
    causal: bool = True
    """Whether a token sees only those before it. Encoders see all."""
    encoder: EncoderConfig | None = None
    """What reads the source: of an `EncoderDecoder` alone."""
    pooler: bool = False
    """Whether the first token's vector goes through a linear map and tanh, as in BERT."""
    tie_embeddings: bool = True
    """Whether the output matrix is the embedding table."""
    final_norm: NormConfig | None = NormConfig()
    """The norm before the output matrix: pre-norm stacks need one, post-norm stacks have it."""
    embedding_dropout: float = 0.0
    """Of the embeddings."""
    precision: Precision = Precision()
    initialization: Initialization = Initialization()
    layer_loop: LayerLoop = "auto"
    """How layers are compiled: one after the other, or as a scan, which compiles in the time of one
    layer. The same weights serve both."""
    remat: RematPolicy = "none"
    """What is computed again in the backward pass in place of being kept: nothing; all but products
    with weights; all but each layer's input. Or nothing is computed again but what is no product
    with a weight, and those products wait in the host's memory."""
    pad_vocab_to_multiple: int = 128
    """Rows of the embedding are padded to a multiple of this, so that they divide among devices."""

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name in ("d_model", "num_layers", "pad_vocab_to_multiple"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("vocab_size", "num_token_types"):
            check_at_least(f"model.{name}", getattr(self, name), 0)
        check_fraction("model.embedding_dropout", self.embedding_dropout)
        _check_stack("model", self.num_layers, self.layer_pattern, self.d_model)
        for block in self.layer_pattern if self.causal else ():
            if isinstance(block.feed_forward, MoEConfig) and not block.feed_forward.causal:
                raise ValueError(
                    f"mixture.capacity {block.feed_forward.capacity_factor}: lets later tokens decide "
                    "what earlier ones lose, and the model is causal; set it to 0"
                )
        if self.encoder is not None:
            check_at_least("model.encoder.num_layers", self.encoder.num_layers, 1)
            check_at_least("model.encoder.vocab_size", self.encoder.vocab_size, 0)
            _check_stack(
                "model.encoder", self.encoder.num_layers, self.encoder.layer_pattern, self.d_model
            )

    @property
    def padded_vocab_size(self) -> int:
        """V with the padding: rows of the embedding table."""
        return self.pad_vocab_size(self.vocab_size)

    @property
    def source_vocab_size(self) -> int:
        """V of what an encoder-decoder reads."""
        own = 0 if self.encoder is None else self.encoder.vocab_size
        return own or self.vocab_size

    def pad_vocab_size(self, vocab_size: int) -> int:
        """The rows of a table of so many words."""
        return -(-vocab_size // self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple

    @property
    def max_length(self) -> int | None:
        """The longest input that the model can take, or None."""
        return (
            self.position_embedding.max_length
            if isinstance(self.position_embedding, LearnedPositions)
            else None
        )


def _check_stack(name: str, layers: int, pattern: tuple[BlockConfig, ...], width: int) -> None:
    if not pattern:
        raise ValueError(f"{name}.pattern (): has no layers; give one BlockConfig or more")
    if layers < len(pattern):
        raise ValueError(
            f"{name}.layers {layers}: is fewer than the {len(pattern)} blocks of {name}.pattern; "
            "give as many or more"
        )
    for block in pattern:
        for mixer in (block.mixer, block.cross_attention):
            if mixer is not None:
                mixer.check_d_model(width)

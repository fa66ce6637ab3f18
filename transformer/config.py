"""Configuration of a model: frozen dataclasses, validated when they are built.

Importing this module imports no JAX: `--help`, `describe` and the tests of settings read
configurations without it. The parts live beside what they configure (`layers.layer_config`,
`attention.attention_config`, ...); this module puts them together.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from transformer.attention.attention_config import AttentionConfig, MixerConfig
from transformer.attention.position_config import LearnedPositions, NoPosition, PositionEmbedding
from transformer.layers.layer_config import (
    FeedForwardConfig,
    MaskedHeadConfig,
    MoEConfig,
    NormConfig,
)
from transformer.precision import Precision
from transformer.validation import (
    check_at_least,
    check_choice,
    check_fraction,
    check_numbers,
    check_types,
)

if TYPE_CHECKING:
    import jax

Initializer = Callable[["jax.Array", tuple[int, ...], Any], "jax.Array"]
"""(random key, shape, dtype) -> initial values, as in `jax.nn.initializers`."""

NormPlacement = Literal["pre", "post", "sandwich", "parallel"]
LayerLoop = Literal["auto", "scan", "unroll"]
RematPolicy = Literal["none", "dots", "full", "offload"]
Pooling = Literal["first", "mean", "max"]


@dataclasses.dataclass(frozen=True)
class Initialization:
    """Initial values of weights: normal, with a fixed standard deviation or by fan-in."""

    std: float = 0.02
    """Standard deviation of every matrix. 0: 1/sqrt(fan-in), which suits any width."""
    embedding_std: float = 0.02
    """Standard deviation of token and position embeddings."""
    depth_scaled: bool = True
    """Divide the standard deviation of matrices that write to the residual stream by sqrt(2 L), as
    GPT-2 does."""

    def __post_init__(self) -> None:
        check_at_least("initialization.std", self.std, 0)
        check_at_least("initialization.embedding_std", self.embedding_std, 0)

    def matrix_initializer(
        self, inputs: Mapping[str, int], *, num_residual_layers: int = 0
    ) -> Initializer:
        """Return the initializer of a matrix.

        Args:
          inputs: Sizes of the axes that the matrix sums over; their product is the fan-in.
          num_residual_layers: L if the result is added to the residual stream, else 0.
        """
        from flax import linen as nn

        std = self.std or 1 / math.sqrt(math.prod(inputs.values()))
        if self.depth_scaled and num_residual_layers:
            std /= math.sqrt(2 * num_residual_layers)
        return nn.initializers.normal(std)

    def embedding_initializer(self) -> Initializer:
        """Return the initializer of an embedding table."""
        from flax import linen as nn

        return nn.initializers.normal(self.embedding_std)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One layer: a mixer, optional cross-attention, and a feed-forward."""

    mixer: MixerConfig = AttentionConfig()
    """Layer that mixes tokens: self-attention, one of its variants, or a recurrent baseline."""
    cross_attention: MixerConfig | None = None
    """Attention to the encoder's output, after the mixer; None in decoder-only models."""
    feed_forward: FeedForwardConfig | MoEConfig | None = FeedForwardConfig()
    """Feed-forward or mixture of experts; None: no feed-forward."""
    norm: NormConfig | None = NormConfig()
    """Norm of each sublayer; None: no norms."""
    mixer_norm: bool = True
    """Apply the norm of the mixer. False in the first layer of ModernBERT, whose input comes
    from a norm."""
    norm_placement: NormPlacement = "pre"
    """`pre`: x + f(norm(x)). `post`: norm(x + f(x)) (Vaswani et al. 2017). `sandwich`:
    x + norm(f(norm(x))) (Ding et al. 2021). `parallel`: mixer and feed-forward read the same
    x, each through a norm of its own, and both are added to it (GPT-NeoX)."""
    residual: bool = True
    """Add x to the output of each sublayer. False is for ablations: deep stacks hardly train."""
    residual_dropout: float = 0.0
    """Dropout rate of each sublayer's output before it is added to the residual stream."""

    def __post_init__(self) -> None:
        check_choice("block.norm_placement", self.norm_placement, get_args(NormPlacement))
        check_fraction("block.residual_dropout", self.residual_dropout)
        if not self.mixer_norm and self.norm_placement == "sandwich":
            raise ValueError(
                "block.mixer_norm false: sandwich placement has two norms of the mixer; set it to "
                "true, or norm_placement to pre"
            )

    @functools.cached_property
    def needs_memory(self) -> bool:
        """True if the layer needs the output of an encoder."""
        return self.cross_attention is not None or self.mixer.reads_memory


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Encoder of an encoder-decoder. Width, positions and precision come from the model."""

    num_layers: int = 6
    """Number of encoder layers."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Repeated sequence of P layers: layer i is `layer_pattern[i % P]`."""
    final_norm: NormConfig | None = NormConfig()
    """Norm of the encoder's output. Pre-norm stacks need one; post-norm stacks end with one."""
    vocab_size: int = 0
    """Size of the source vocabulary. 0: source and target share vocabulary and embeddings."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A model: embedded tokens, a stack of layers, and an output matrix or head."""

    vocab_size: int = 0
    """V, number of tokens in the vocabulary. 0: set from the run's tokenizer."""
    d_model: int = 512
    """D, width of the hidden states (the residual stream)."""
    num_layers: int = 6
    """L, number of layers; of the decoder in an encoder-decoder."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Repeated sequence of P layers: layer i is `layer_pattern[i % P]`."""
    position_embedding: PositionEmbedding = NoPosition()
    """Position embedding added to the token embeddings. RoPE and relative positions are settings
    of the attention layers instead."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(D) (Vaswani et al. 2017, section 3.4)."""
    embedding_norm: NormConfig | None = None
    """Norm of the summed embeddings, as in BERT; None: no norm."""
    num_token_types: int = 0
    """Number of token types (BERT's segments A and B: 2). 0: no token-type embedding."""
    causal: bool = True
    """Apply a causal mask: a token attends only to itself and earlier tokens."""
    encoder: EncoderConfig | None = None
    """Encoder of an `EncoderDecoder`; None for other models."""
    pooler: bool = False
    """Apply a linear layer and tanh to the pooled hidden state, as in BERT."""
    masked_head: MaskedHeadConfig = MaskedHeadConfig()
    """Head of a `MaskedLanguageModel`; other models ignore it."""
    tie_embeddings: bool = True
    """Use the token embedding as output matrix."""
    logit_scale: float = 1.0
    """Factor of the output matrix. muP (Yang et al. 2022): the width at which the learning rate was
    tuned over D, so that logits do not grow with the width. T5 with tied weights: 1 / sqrt(D)."""
    logit_bias: bool = False
    """Add a trained bias to each logit. Encoder-decoders only (Marian)."""
    final_norm: NormConfig | None = NormConfig()
    """Norm before the output matrix. Pre-norm stacks need one; post-norm stacks end with one."""
    logit_soft_cap: float = 0.0
    """Soft cap c: c tanh(logit / c) limits logits to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    embedding_dropout: float = 0.0
    """Dropout rate of the summed embeddings."""
    precision: Precision = Precision()
    """Dtypes of parameters, of computation, and of reductions."""
    initialization: Initialization = Initialization()
    """Initial values of weights."""
    layer_loop: LayerLoop = "auto"
    """`scan`: layers run inside `lax.scan` and compile in the time of one. `unroll`: layers are
    compiled one by one; steps are faster. Both use the same parameters."""
    remat: RematPolicy = "none"
    """Rematerialization: what the backward pass recomputes to save memory. `none`: nothing.
    `dots`: everything but matmuls with weights. `full`: everything, from each layer's input.
    `offload`: like `dots`, with the saved matmul outputs kept in host memory."""
    pad_vocab_to_multiple: int = 128
    """Pad embedding rows to a multiple of this, so that they divide evenly among devices."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        check_numbers(self, "model")
        for name in ("d_model", "num_layers", "pad_vocab_to_multiple"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("vocab_size", "num_token_types"):
            check_at_least(f"model.{name}", getattr(self, name), 0)
        check_fraction("model.embedding_dropout", self.embedding_dropout)
        check_at_least("model.logit_soft_cap", self.logit_soft_cap, 0)
        if self.logit_scale <= 0:
            raise ValueError(f"model.logit_scale {self.logit_scale}: give a positive factor")
        if self.logit_bias and (self.encoder is None or not self.causal):
            raise ValueError(
                "model.logit_bias true: is for causal encoder-decoders only; set it to false"
            )
        check_choice("model.layer_loop", self.layer_loop, get_args(LayerLoop))
        check_choice("model.remat", self.remat, get_args(RematPolicy))
        _check_layers("model", self.num_layers, self.layer_pattern, self.d_model)
        for block in self.layer_pattern if self.causal else ():
            if isinstance(block.feed_forward, MoEConfig) and not block.feed_forward.causal:
                raise ValueError(
                    f"mixture.capacity_factor {block.feed_forward.capacity_factor}: lets later "
                    "tokens displace earlier ones, and the model is causal; set it to 0"
                )
        if self.encoder is not None:
            check_at_least("model.encoder.num_layers", self.encoder.num_layers, 1)
            check_at_least("model.encoder.vocab_size", self.encoder.vocab_size, 0)
            _check_layers(
                "model.encoder", self.encoder.num_layers, self.encoder.layer_pattern, self.d_model
            )

    # The properties are cached because models read them whenever they are applied.

    @functools.cached_property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: V rounded up to a multiple of `pad_vocab_to_multiple`."""
        if not self.vocab_size:  # The trainer sets it; without it there is no embedding.
            raise ValueError(
                "model.vocab_size 0: is not set; give the tokenizer's number of tokens"
            )
        return self.pad_vocab_size(self.vocab_size)

    @functools.cached_property
    def source_vocab_size(self) -> int:
        """V of the source; equal to `vocab_size` if source and target share the vocabulary."""
        own = 0 if self.encoder is None else self.encoder.vocab_size
        return own or self.vocab_size

    @functools.cached_property
    def max_length(self) -> int | None:
        """Longest supported input (rows of learned positions); None: unlimited."""
        positions = self.position_embedding
        return positions.max_length if isinstance(positions, LearnedPositions) else None

    def pad_vocab_size(self, vocab_size: int) -> int:
        """Return the number of embedding rows of a vocabulary of this size."""
        return -(-vocab_size // self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple


def _check_layers(
    name: str, num_layers: int, pattern: tuple[BlockConfig, ...], d_model: int
) -> None:
    """Raise ValueError if a pattern is empty, too long, or does not fit the model width."""
    if not pattern:
        raise ValueError(f"{name}.layer_pattern (): has no layers; give one BlockConfig or more")
    if num_layers < len(pattern):
        raise ValueError(
            f"{name}.num_layers {num_layers}: is fewer than the {len(pattern)} blocks of "
            f"{name}.layer_pattern; give at least {len(pattern)}"
        )
    for block in pattern:
        for mixer in (block.mixer, block.cross_attention):
            if mixer is not None:
                _check_hashable(name, mixer)
                mixer.check_d_model(d_model)


def _check_hashable(name: str, mixer: MixerConfig) -> None:
    """Raise ValueError for a setting such as a list: `jax.jit` compares settings by their hash."""
    for field in dataclasses.fields(mixer):
        value = getattr(mixer, field.name)
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"{name}.layer_pattern: {type(mixer).__name__}.{field.name} of type "
                f"{type(value).__name__} has no hash; give a tuple or another frozen value"
            ) from None

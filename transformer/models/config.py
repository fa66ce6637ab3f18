"""Settings of a model: the whole of its parts, whose own settings stand beside them."""

import dataclasses
import functools
import math
from typing import Annotated, Any

from transformer.attention.mixer import MixerConfig
from transformer.layers.activations import MaskedHeadActivation, PoolerActivation
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions, NoPosition, PositionEmbedding
from transformer.model_context import Initialization
from transformer.models.block import BlockConfig
from transformer.models.stack import LayerLoop, RematPolicy
from transformer.precision import Precision
from transformer.validation import (
    Bounds,
    Fraction,
    Mark,
    NonNegativeFloat,
    PositiveFloat,
    Settings,
    check_nested_settings,
)


@dataclasses.dataclass(frozen=True)
class MaskedHeadConfig(Settings):
    """Head of a masked language model: a linear layer, an activation and a norm, then logits."""

    activation: MaskedHeadActivation = "gelu"
    """Activation of the linear layer."""
    bias: bool = True
    """Add a bias to the linear layer."""
    output_bias: bool = True
    """Add a bias to each logit."""


@dataclasses.dataclass(frozen=True)
class PoolerConfig(Settings):
    """Layer of a model with `pooler`: a linear layer, an activation and perhaps a norm."""

    activation: PoolerActivation = "tanh"
    """Activation of the linear layer: tanh in BERT, gelu in ELECTRA, relu in DistilBERT."""
    bias: bool = True
    """Add a bias to the linear layer."""
    norm: NormConfig | None = None
    """Norm of the result, as in ModernBERT; None: no norm."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Settings):
    """Encoder of an encoder-decoder. Width, positions and precision come from the model."""

    num_layers: Annotated[int, Bounds(1, 10_000)] = 6
    """Number of encoder layers."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Repeated sequence of P layers: layer i is `layer_pattern[i % P]`."""
    final_norm: NormConfig | None = NormConfig()
    """Norm of the encoder's output. Only stacks of `post` layers end with one already."""
    vocab_size: Annotated[int, Bounds(0, 2**28)] = 0
    """Size of the source vocabulary. 0: source and target share vocabulary and embeddings."""
    max_length: Annotated[int, Bounds(0, 2**24)] = 0
    """Longest source, in tokens, of a model with learned positions, as in LED (Beltagy et al. 2020,
    section 7). 0: that of `position_embedding`."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Settings):
    """A model: embedded tokens, a stack of layers, and an output matrix or head."""

    vocab_size: Annotated[int, Bounds(0, 2**28)] = 0
    """V, number of tokens in the vocabulary. 0: set from the run's tokenizer."""
    d_model: Annotated[int, Bounds(1, 2**24), Mark.COMMON] = 512
    """D, width of the hidden states (the residual stream)."""
    num_layers: Annotated[int, Bounds(1, 10_000), Mark.COMMON] = 6
    """L, number of layers; of the decoder in an encoder-decoder."""
    layer_pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Repeated sequence of P layers: layer i is `layer_pattern[i % P]`."""
    share_layers: bool = False
    """Use one set of weights for all layers at a place of the pattern, as ALBERT (Lan et al. 2020,
    section 3.1) and the Universal Transformer (Dehghani et al. 2019) do."""
    position_embedding: PositionEmbedding = NoPosition()
    """Position embedding added to the token embeddings. RoPE and relative positions are settings
    of the attention layers instead."""
    embedding_dim: Annotated[int, Bounds(0, 2**24)] = 0
    """Width of the embeddings of tokens, positions and types, which a linear layer maps to D after
    their norm (Lan et al. 2020, section 3.1; ELECTRA). For encoders. 0: D, without that layer."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(D) (Vaswani et al. 2017, section 3.4)."""
    embedding_scale: PositiveFloat = 1.0
    """Factor of the token embeddings, beside sqrt(D): muP's input multiplier (Yang et al. 2022),
    Granite's `embedding_multiplier`."""
    embedding_norm: NormConfig | None = None
    """Norm of the summed embeddings, as in BERT; None: no norm."""
    num_token_types: Annotated[int, Bounds(0, 2**28)] = 0
    """Number of token types (BERT's segments A and B: 2). 0: no token-type embedding."""
    causal: bool = True
    """Apply a causal mask: a token attends only to itself and earlier tokens."""
    encoder: EncoderConfig | None = None
    """Encoder of an `EncoderDecoder`; None for other models."""
    pooler: bool = False
    """Apply the layer `pooler_layer` to the pooled hidden state, as BERT does; in a tagger, to that
    of each token, as ModernBERT does."""
    pooler_layer: PoolerConfig = PoolerConfig()
    """Layer that `pooler` applies."""
    masked_head: MaskedHeadConfig = MaskedHeadConfig()
    """Head of a `MaskedLanguageModel`; other models ignore it."""
    tie_embeddings: bool = True
    """Use the token embedding as output matrix."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the output matrix. muP (Yang et al. 2022): the width at which the learning rate was
    tuned over D, so that logits do not grow with the width. T5 with tied weights: 1 / sqrt(D)."""
    logit_bias: bool = False
    """Add a trained bias to each logit (GPT-J, Phi, Marian). Language models and encoder-decoders
    only; `masked_head` has that of a masked language model."""
    final_norm: NormConfig | None = NormConfig()
    """Norm before the output matrix. Only stacks of `post` layers end with one already."""
    logit_soft_cap: NonNegativeFloat = 0.0
    """Soft cap c: c tanh(logit / c) limits logits to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    embedding_dropout: Fraction = 0.0
    """Dropout rate of the summed embeddings."""
    precision: Annotated[Precision, Mark.COMMON] = Precision()
    """Dtypes of parameters, of computation, and of reductions."""
    initialization: Initialization = Initialization()
    """Initial values of weights."""
    layer_loop: Annotated[LayerLoop, Mark.RESUMABLE] = "auto"
    """`scan`: layers run inside `lax.scan` and compile in the time of one. `unroll`: layers are
    compiled one by one; steps are faster. Both use the same parameters."""
    remat: Annotated[RematPolicy, Mark.RESUMABLE] = "none"
    """Rematerialization: what the backward pass recomputes to save memory. `none`: nothing, but
    for attention on a CPU, where it is `dots`. `dots`: everything but matmuls with weights. `full`:
    everything, from each layer's input. `offload`: like `dots`, with the saved matmul outputs kept
    in host memory."""
    pad_vocab_to_multiple: Annotated[int, Bounds(1, 2**20)] = 128
    """Pad embedding rows to a multiple of this, so that they divide evenly among devices."""

    def __post_init__(self) -> None:
        check_nested_settings(self)
        if self.logit_bias and not self.causal:
            raise ValueError(
                "TransformerConfig.logit_bias true: is for causal models only; set it to false"
            )
        if (
            self.encoder is not None
            and self.encoder.max_length
            and not isinstance(self.position_embedding, LearnedPositions)
        ):
            raise ValueError(
                f"EncoderConfig.max_length {self.encoder.max_length}: is for learned positions "
                "only; set it to 0"
            )
        if self.embedding_dim and (self.encoder is not None or self.causal):
            raise ValueError(
                f"TransformerConfig.embedding_dim {self.embedding_dim}: is for encoders only; set "
                "it to 0, or causal to false"
            )
        check_layers(self, self.d_model)
        for block in self.layer_pattern if self.causal else ():
            if isinstance(block.feed_forward, MoEConfig) and not block.feed_forward.causal:
                raise ValueError(
                    f"MoEConfig.capacity_factor {block.feed_forward.capacity_factor}: lets later "
                    "tokens displace earlier ones, and the model is causal; set it to 0"
                )
        if self.encoder is not None:
            check_layers(self.encoder, self.d_model)

    # The properties are cached because models read them whenever they are applied.

    @functools.cached_property
    def embedding_width(self) -> int:
        """Width of the rows of the embedding table, and of the input of the output matrix."""
        return self.embedding_dim or self.d_model

    @functools.cached_property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: V rounded up to a multiple of `pad_vocab_to_multiple`."""
        if not self.vocab_size:  # The trainer sets it; without it there is no embedding.
            raise ValueError(
                "TransformerConfig.vocab_size 0: is not set; give the tokenizer's number of tokens"
            )
        return self.pad_vocab_size(self.vocab_size)

    @functools.cached_property
    def source_vocab_size(self) -> int:
        """V of the source; equal to `vocab_size` if source and target share the vocabulary."""
        if self.encoder is None or not self.encoder.vocab_size:
            return self.vocab_size
        return self.encoder.vocab_size

    @functools.cached_property
    def max_length(self) -> int | None:
        """Longest supported input (rows of learned positions); None: unlimited."""
        positions = self.position_embedding
        return positions.max_length if isinstance(positions, LearnedPositions) else None

    @functools.cached_property
    def source(self) -> "TransformerConfig":
        """The config with the learned positions of the source."""
        if self.encoder is None or not self.encoder.max_length:
            return self
        positions: Any = self.position_embedding
        longer = dataclasses.replace(positions, max_length=self.encoder.max_length)
        return dataclasses.replace(self, position_embedding=longer)

    def pad_vocab_size(self, vocab_size: int) -> int:
        """Return the number of embedding rows of a vocabulary of this size."""
        return math.ceil(vocab_size / self.pad_vocab_to_multiple) * self.pad_vocab_to_multiple


def check_layers(config: TransformerConfig | EncoderConfig, d_model: int) -> None:
    """Raise ValueError if a layer pattern is empty, too long, or does not fit the model's width."""
    name, pattern = type(config).__name__, config.layer_pattern
    if not pattern:
        raise ValueError(f"{name}.layer_pattern (): has no layers; give one BlockConfig or more")
    if config.num_layers < len(pattern):
        raise ValueError(
            f"{name}.num_layers {config.num_layers}: is fewer than the {len(pattern)} blocks of "
            f"layer_pattern; give at least {len(pattern)}"
        )
    for block in pattern:
        _check_mixer(name, block.mixer, d_model)
        if block.cross_attention is not None:
            _check_mixer(name, block.cross_attention, d_model)


def _check_mixer(name: str, mixer: MixerConfig, d_model: int) -> None:
    try:
        hash(mixer)  # `jax.jit` compares settings by their hash, which a list in them has not
    except TypeError as error:
        raise ValueError(
            f"{name}.layer_pattern: {type(mixer).__name__} has no hash ({error}); give a tuple "
            "or another frozen value"
        ) from None
    mixer.check_d_model(d_model)

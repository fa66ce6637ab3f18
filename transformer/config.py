"""The configuration of a whole model: frozen, and checked when it is built."""

import dataclasses
from typing import Literal

from transformer.block_config import BlockConfig
from transformer.checks import check_least, check_numbers, check_share
from transformer.initialization import Initialization
from transformer.layer_configs import MixtureConfig, NormConfig
from transformer.positions import EmbeddingPosition, LearnedPositions, NoPosition
from transformer.precision import Precision

Loop = Literal["auto", "scan", "unroll"]
Remat = Literal["none", "dots", "full", "offload"]


Pooling = Literal["first", "mean"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder-decoder. Width, positions and precision are the model's."""

    layers: int = 6
    """L of the encoder."""
    pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
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
    width: int = 512
    """D."""
    layers: int = 6
    """L."""
    pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    """Layer i is pattern[i mod P]."""
    position: EmbeddingPosition = NoPosition()
    """What is added to the embeddings to tell positions."""
    embedding_scale: bool = False
    """Whether words' vectors are multiplied by sqrt(D) (Vaswani et al. 2017, section 3.4)."""
    embedding_norm: NormConfig | None = None
    """The norm of the embeddings, as BERT has it."""
    token_types: int = 0
    """Rows of a table that tells kinds of tokens apart, such as BERT's two sentences; 0: none."""
    causal: bool = True
    """Whether a token sees only those before it. Encoders see all."""
    encoder: EncoderConfig | None = None
    """What reads the source: of an `EncoderDecoder` alone."""
    pooler: bool = False
    """Whether the first token's vector goes through a linear map and tanh, as in BERT."""
    tied: bool = True
    """Whether the output matrix is the embedding table."""
    final_norm: NormConfig | None = NormConfig()
    """The norm before the output matrix: pre-norm stacks need one, post-norm stacks have it."""
    dropout: float = 0.0
    """Of the embeddings."""
    precision: Precision = Precision()
    initialization: Initialization = Initialization()
    loop: Loop = "auto"
    """How layers are compiled: one after the other, or as a scan, which compiles in the time of one
    layer. The same weights serve both."""
    remat: Remat = "none"
    """What is computed again in the backward pass in place of being kept: nothing; all but products
    with weights; all but each layer's input. Or nothing is computed again but what is no product
    with a weight, and those products wait in the host's memory."""
    vocab_multiple: int = 128
    """Rows of the embedding are padded to a multiple of this, so that they divide among devices."""

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name in ("width", "layers", "vocab_multiple"):
            check_least(f"model.{name}", getattr(self, name), 1)
        for name in ("vocab_size", "token_types"):
            check_least(f"model.{name}", getattr(self, name), 0)
        check_share("model.dropout", self.dropout)
        _check_stack("model", self.layers, self.pattern, self.width)
        for block in self.pattern if self.causal else ():
            if isinstance(block.feed_forward, MixtureConfig) and not block.feed_forward.causal:
                raise ValueError(
                    f"mixture.capacity {block.feed_forward.capacity}: lets later tokens decide "
                    "what earlier ones lose, and the model is causal; set it to 0"
                )
        if self.encoder is not None:
            check_least("model.encoder.layers", self.encoder.layers, 1)
            check_least("model.encoder.vocab_size", self.encoder.vocab_size, 0)
            _check_stack("model.encoder", self.encoder.layers, self.encoder.pattern, self.width)

    @property
    def vocab_rows(self) -> int:
        """V with the padding: rows of the embedding table."""
        return self.padded(self.vocab_size)

    @property
    def source_size(self) -> int:
        """V of what an encoder-decoder reads."""
        own = 0 if self.encoder is None else self.encoder.vocab_size
        return own or self.vocab_size

    def padded(self, words: int) -> int:
        """The rows of a table of so many words."""
        return -(-words // self.vocab_multiple) * self.vocab_multiple

    @property
    def max_length(self) -> int | None:
        """The longest input that the model can take, or None."""
        return self.position.length if isinstance(self.position, LearnedPositions) else None


def _check_stack(name: str, layers: int, pattern: tuple[BlockConfig, ...], width: int) -> None:
    if not pattern:
        raise ValueError(f"{name}.pattern (): has no layers; give one BlockConfig or more")
    if layers < len(pattern):
        raise ValueError(
            f"{name}.layers {layers}: is fewer than the {len(pattern)} blocks of {name}.pattern; "
            "give as many or more"
        )
    for block in pattern:
        for mixer in (block.mixer, block.cross):
            if mixer is not None:
                mixer.check(width)

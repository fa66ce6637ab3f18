"""The configuration of a whole model: frozen, and checked when it is built."""

import dataclasses

from transformer.block import BlockConfig
from transformer.norms import NormConfig
from transformer.positions import EmbeddingPosition, LearnedPositions, NoPosition
from transformer.precision import Precision
from transformer.stack import Loop, Remat
from transformer.weights import Initialization


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
    with weights; all but each layer's input."""
    vocab_multiple: int = 128
    """Rows of the embedding are padded to a multiple of this, so that they divide among devices."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} {getattr(self, name)}: give 1 or more")
        if not self.pattern:
            raise ValueError("model.pattern (): has no layers; give one BlockConfig or more")
        if self.layers < len(self.pattern):
            raise ValueError(
                f"model.layers {self.layers}: is fewer than the {len(self.pattern)} blocks of "
                "model.pattern; give as many or more"
            )
        for block in self.pattern:
            block.mixer.check(self.width)

    @property
    def vocab_rows(self) -> int:
        """V with the padding: rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def max_length(self) -> int | None:
        """The longest input that the model can take, or None."""
        return self.position.length if isinstance(self.position, LearnedPositions) else None

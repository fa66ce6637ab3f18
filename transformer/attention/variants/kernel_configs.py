"""Settings of the variants of attention. Imports nothing that computes."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.attention.config import MixerConfig, MultiHeadConfig
from transformer.attention.position_config import AttentionPosition, NoPosition, RoPE
from transformer.validation import check_at_least, check_choice, check_fraction


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(MultiHeadConfig):
    """Attention without softmax, a recurrence at decode (sections 3.2 to 3.4 of the paper)."""

    kind: ClassVar[str] = "linear"

    position: NoPosition | RoPE = NoPosition()
    """What turns queries and keys before the features are made of them."""


ProjectionSharing = Literal["none", "heads", "key_value"]


@dataclasses.dataclass(frozen=True)
class LinformerConfig(MultiHeadConfig):
    """softmax(q (E k)^T / sqrt(H)) (F v), with E and F of `rank` rows (equation 7).

    For encoders: every projected key holds something of all tokens. Padded ones are zeroed first.
    """

    kind: ClassVar[str] = "linformer"

    max_length: int = 256
    """The longest input: E and F have a column for each position, of which shorter inputs take the
    first."""
    rank: int = 64
    """How many keys there are in place of the T of a sequence: the paper's k."""
    sharing: ProjectionSharing = "heads"
    """Whether each head has an E and an F, all heads of a layer have the same, or E is F too
    (section 4, additional efficiency techniques). Its layerwise sharing is not to be had: the
    weights of a mixer are those of its layer."""
    max_documents: int = 2
    """How many documents a row may hold, each projected by itself from its own first position, at
    the cost of `rank` keys each; results of rows with more are not a number. Segments that only
    tell of padding, as a classifier has them, need 2 all the same, as nobody knows what they tell
    before the program runs. With 1 there is padding by `lengths` alone."""
    position: NoPosition | RoPE = NoPosition()
    """What turns queries and keys before the projection."""
    dropout: float = 0.0
    """Of the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_length", "rank", "max_documents"):
            check_at_least(f"linformer.{name}", getattr(self, name), 1)
        check_choice("linformer.sharing", self.sharing, get_args(ProjectionSharing))
        check_fraction("linformer.dropout", self.dropout)


FeatureMapKind = Literal["positive", "trigonometric", "relu"]


@dataclasses.dataclass(frozen=True)
class PerformerConfig(MultiHeadConfig):
    """FAVOR+ (section 2): time and memory linear in T, for an error that falls as 1 / sqrt(M).

    Weights under exp(-40) of what the two tokens' largest features would give may come out larger;
    elsewhere features are as the formulas have them, with factors that cancel taken out.
    Trigonometric features have no such bound: where weights are small their sums come near zero, of
    either sign, and results are far off. They are there to be compared.
    """

    kind: ClassVar[str] = "performer"

    num_features: int = 128
    """M. More are nearer to softmax, at a cost that grows with them."""
    feature_map: FeatureMapKind = "positive"
    """Positive or trigonometric features, which estimate softmax, or ReLU, a kernel of its own."""
    orthogonal: bool = True
    """Whether random vectors stand at right angles, in blocks of H: a smaller error."""
    seed: int = 0
    """Of the random vectors, one set for all heads of a layer."""
    redraw_index: int = 0
    """Count up to draw others. The vectors are the mixer's `constants`, arguments of a call: who
    calls it may give new ones without compiling again."""
    position: NoPosition | RoPE = NoPosition()
    """What turns queries and keys before the features are made of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("performer.num_features", self.num_features, 1)
        check_choice("performer.feature_map", self.feature_map, get_args(FeatureMapKind))
        if self.feature_map == "trigonometric" and self.num_features % 2:
            raise ValueError(
                f"performer.num_features {self.num_features}: sines and cosines come in pairs; "
                "give an even number"
            )
        for name in ("seed", "redraw_index"):
            check_at_least(f"performer.{name}", getattr(self, name), 0)

    @property
    def num_random_vectors(self) -> int:
        """How many random vectors M features take: sine and cosine share one."""
        return self.num_features // 2 if self.feature_map == "trigonometric" else self.num_features


@dataclasses.dataclass(frozen=True)
class PrimerConfig(MixerConfig):
    """Multi-DConv-head attention (section 4.2 and appendix A.3 of the paper).

    Primer has it together with a feed-forward of squared ReLU.
    """

    kind: ClassVar[str] = "primer"

    num_heads: int = 8
    """N."""
    head_dim: int = 0
    """H; 0 means D / N."""
    bias: bool = False
    """Biases of the projections."""
    position: AttentionPosition = NoPosition()
    """What queries and keys know of each other's positions, after the convolution."""
    dropout: float = 0.0
    """Of the attention weights."""

    def __post_init__(self) -> None:
        check_at_least("primer.num_heads", self.num_heads, 1)
        check_at_least("primer.head_dim", self.head_dim, 0)
        check_fraction("primer.dropout", self.dropout)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    def resolved_head_dim(self, width: int) -> int:
        """H for a model of width D. Raises ValueError if D / N is needed and is no integer."""
        if not self.head_dim and width % self.num_heads:
            raise ValueError(
                f"primer.num_heads {self.num_heads}: does not divide the width {width}; "
                "give a divisor of it, or set head_dim"
            )
        return self.head_dim or width // self.num_heads

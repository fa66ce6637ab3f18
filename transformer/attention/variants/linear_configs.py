"""Settings of linear-time attention (feature maps, low rank) and of Primer.

Importing this module loads no JAX.
"""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.attention.mixer import MixerConfig
from transformer.attention.position_bias import AttentionPosition
from transformer.attention.projections import MultiHeadConfig
from transformer.attention.rope import RoPE
from transformer.layers.position_embedding import NoPosition
from transformer.validation import check_at_least, check_choice, check_fraction


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(MultiHeadConfig):
    """Attention with the feature map elu + 1 in place of a softmax (Katharopoulos et al. 2020).

    Decoding is a recurrence with a state of constant size (sections 3.2 to 3.4).
    """

    # No dropout here and in `PerformerConfig`: there are no attention weights to drop.
    kind: ClassVar[str] = "linear"

    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys, applied before the feature map."""


ProjectionSharing = Literal["none", "heads", "key_value"]


@dataclasses.dataclass(frozen=True)
class LinformerConfig(MultiHeadConfig):
    """softmax(q (E k)^T / sqrt(H)) (F v) with `rank` rows in E and F (Wang et al. 2020, eq. 7).

    For encoders only: each projected key mixes all tokens. Padding is zeroed before projection.
    """

    kind: ClassVar[str] = "linformer"

    max_length: int = 256
    """Longest input, in tokens. E and F have one column per position; shorter inputs use the first
    columns."""
    rank: int = 64
    """Number of projected keys, k in the paper."""
    sharing: ProjectionSharing = "heads"
    """none: an E and an F for each key-value head. heads: one E and one F per layer. key_value: one
    matrix per layer for both (section 4). Sharing between layers is not supported."""
    max_documents: int = 2
    """Documents per row. Each is projected separately, from its own first position, at the cost of
    `rank` keys. Rows with more documents return NaN. Segments that only mark padding, as in a
    classifier, also need 2, because the number of documents is unknown at compile time. With 1,
    padding is given by `key_lengths` only."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys, applied before the projection."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("linformer.max_length", self.max_length, 1)
        check_at_least("linformer.rank", self.rank, 1)
        check_at_least("linformer.max_documents", self.max_documents, 1)
        check_choice("linformer.sharing", self.sharing, get_args(ProjectionSharing))
        check_fraction("linformer.dropout", self.dropout)


FeatureMapKind = Literal["positive", "trigonometric", "relu"]


@dataclasses.dataclass(frozen=True)
class PerformerConfig(MultiHeadConfig):
    """FAVOR+ random features (Choromanski et al. 2021, section 2).

    Time and memory are linear in T; the error of the softmax estimate falls as 1 / sqrt(M).

    Positive features have a floor: a weight below exp(-40) of the product of the two tokens'
    largest features may come out larger than the formula says. Trigonometric features have no such
    bound. Where weights are small, their sums are close to zero with either sign and results are
    inaccurate; they are included for comparison.
    """

    kind: ClassVar[str] = "performer"

    num_features: int = 128
    """M, number of features. More are closer to softmax and cost more time and memory."""
    feature_map: FeatureMapKind = "positive"
    """positive, trigonometric: estimates of exp(q . k). relu: another function of q and k."""
    orthogonal: bool = True
    """Draw random vectors in orthogonal blocks of H, which lowers the variance."""
    seed: int = 0
    """Seed of the random vectors, which all heads of a layer share."""
    redraw_index: int = 0
    """Increase it to draw new vectors. They are the mixer's `constants`, inputs of a call, so new
    ones need no recompilation."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys, applied before the feature map."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("performer.num_features", self.num_features, 1)
        check_choice("performer.feature_map", self.feature_map, get_args(FeatureMapKind))
        if self.feature_map == "trigonometric" and self.num_features % 2:
            raise ValueError(
                f"performer.num_features {self.num_features}: sines and cosines come in pairs; "
                "give an even number"
            )
        check_at_least("performer.seed", self.seed, 0)
        check_at_least("performer.redraw_index", self.redraw_index, 0)

    @property
    def num_random_vectors(self) -> int:
        """Number of random vectors for M features: a sine and a cosine share one."""
        return self.num_features // 2 if self.feature_map == "trigonometric" else self.num_features


@dataclasses.dataclass(frozen=True)
class PrimerConfig(MixerConfig):
    """Multi-DConv-head attention (So et al. 2021, section 4.2 and appendix A.3).

    Primer combines it with a squared-ReLU feed-forward.
    """

    kind: ClassVar[str] = "primer"

    num_heads: int = 8
    """N, number of heads."""
    head_dim: int = 0
    """H, width of a head. 0: D / N."""
    bias: bool = False
    """Add biases to the projections."""
    position: AttentionPosition = NoPosition()
    """Position information of queries and keys, applied after the convolution."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("primer.num_heads", self.num_heads, 1)
        check_at_least("primer.head_dim", self.head_dim, 0)
        check_fraction("primer.dropout", self.dropout)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    def resolved_head_dim(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: `head_dim` is 0 and N does not divide D.
        """
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"primer.num_heads {self.num_heads}: does not divide the width {d_model}; "
                "give a divisor of it, or set head_dim"
            )
        return self.head_dim or d_model // self.num_heads

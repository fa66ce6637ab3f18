"""How well a key answers a query: dot, scaled dot, bilinear and additive scores.

A score is a map of the query, a map of the key (whose result is what a cache keeps), and how the
two meet: as a product, which every form of attention computes, or through an MLP.

Settings of the parts of a layer: norms, mixers, feed-forwards. Imports nothing that computes.

What can be chosen about full attention.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from transformer.validation import check_at_least

if TYPE_CHECKING:
    pass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from transformer.attention.position_config import (
    AttentionPosition,
    NoPosition,
    RelativePositions,
    RoPE,
)
from transformer.hardware import Hardware
from transformer.layers.config import NormConfig
from transformer.validation import check_choice, check_fraction

if TYPE_CHECKING:
    from transformer.attention.backends.choose import AttentionSpec


@dataclasses.dataclass(frozen=True)
class ScaledDotScore:
    """q . k / sqrt(H): of unit variance where the entries are (Vaswani et al. 2017, 3.2.1)."""


@dataclasses.dataclass(frozen=True)
class DotScore:
    """q . k (Luong et al. 2015, equation 8, `dot`)."""


@dataclasses.dataclass(frozen=True)
class BilinearScore:
    """q W k, with a matrix for each head (Luong et al. 2015, equation 8, `general`)."""


@dataclasses.dataclass(frozen=True)
class AdditiveScore:
    """w . tanh(W q + U k), an MLP for each head (Bahdanau et al. 2015, appendix A.1.2)."""

    hidden_dim: int = 0
    """Width of the hidden layer; 0 means that of queries."""

    def __post_init__(self) -> None:
        check_at_least("additive_score.hidden_dim", self.hidden_dim, 0)


AttentionScore = ScaledDotScore | DotScore | BilinearScore | AdditiveScore


def score_head_dim(score: AttentionScore, head_dim: int) -> int:
    """How wide queries and keys are where they meet, for heads of width H."""
    return (score.hidden_dim or head_dim) if isinstance(score, AdditiveScore) else head_dim


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """What the configurations of all mixers have in common: the name under which they are built."""

    kind: ClassVar[str]
    reads_memory: ClassVar[bool] = False
    """Whether it looks at the memory beside its own input, as a recurrence with attention inside
    does: then it is given `memory` in the mixer's place of a block, `mask.segments` are those of
    its own input and `mask.key_segments` those of the memory."""

    depends_on_row_index: ClassVar[bool] = False
    """Whether what a token sees follows from where it stands in its row, and not in its document
    alone: documents of a pack are kept apart, but one of them differs from the same alone."""

    def check_d_model(self, d_model: int) -> None:
        """Raises ValueError if a model of this width cannot have it."""


@dataclasses.dataclass(frozen=True)
class MultiHeadConfig(MixerConfig):
    """What the configurations of mixers with heads have in common."""

    num_heads: int = 8
    """N, heads of the queries."""
    num_kv_heads: int = 0
    """K, heads of keys and values: N is multi-head (0 means N), 1 multi-query (Shazeer 2019),
    between them grouped-query (Ainslie et al. 2023)."""
    head_dim: int = 0
    """H of queries and keys; 0 means D / N."""
    bias: bool = True
    """Biases of the query, key, value and output projections."""
    qk_norm: NormConfig | None = None
    """The norm of each head's queries and keys, before they meet (Dehghani et al. 2023)."""

    def __post_init__(self) -> None:
        check_at_least("attention.num_heads", self.num_heads, 1)
        for name in ("num_kv_heads", "head_dim"):
            check_at_least(f"attention.{name}", getattr(self, name), 0)
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"attention.num_kv_heads {self.num_kv_heads}: does not divide heads {self.num_heads}; "
                "give a divisor of it"
            )

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    @property
    def resolved_num_kv_heads(self) -> int:
        """K."""
        return self.num_kv_heads or self.num_heads

    def resolved_head_dim(self, d_model: int) -> int:
        """H for a model of width D. Raises ValueError if D / N is needed and is no integer."""
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"attention.num_heads {self.num_heads}: does not divide the width {d_model}; "
                "give a divisor of it, or set head_width"
            )
        return self.head_dim or d_model // self.num_heads


Backend = Literal["auto", "reference", "query_blocks", "blockwise", "cudnn", "splash", "ring"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MultiHeadConfig):
    """Softmax attention: scaled dot-product unless said otherwise (Vaswani et al. 2017)."""

    kind: ClassVar[str] = "full"

    value_head_dim: int = 0
    """H of values; 0 means that of queries."""
    score: AttentionScore = ScaledDotScore()
    """How well a key answers a query."""
    position: AttentionPosition = NoPosition()
    """What queries and keys know of each other's positions. A memory's are not known."""
    soft_cap: float = 0.0
    """c of c tanh(score / c), which keeps scores within c (Gemma Team 2024, section 2); 0: none."""
    sinks: bool = False
    """Whether each head learns the score of a key without a value, on which a query that looks for
    nothing can rest (Agarwal et al. 2025, section 2.2)."""
    dropout: float = 0.0
    """Of the attention weights."""
    backend: Backend = "auto"
    """How it is computed; `auto` goes by hardware, dtype and mask."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("attention.value_head_dim", self.value_head_dim, 0)
        check_at_least("attention.soft_cap", self.soft_cap, 0)
        check_fraction("attention.dropout", self.dropout)
        check_choice("attention.backend", self.backend, get_args(Backend))
        of_products = isinstance(self.position, RoPE | RelativePositions)
        if of_products and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"attention.position {type(self.position).__name__}: works in products of queries "
                "and keys, not in an AdditiveScore; give ALiBi, BucketedBias or NoPosition"
            )

    def score_head_dim(self, d_model: int) -> int:
        """H of queries and keys where they meet, and of the keys that a cache keeps."""
        return score_head_dim(self.score, self.resolved_head_dim(d_model))

    @property
    def dot_product_only(self) -> bool:
        """Whether its scores are products of queries and keys alone."""
        added = not isinstance(self.position, NoPosition | RoPE)
        return not added and not isinstance(self.score, AdditiveScore) and not self.soft_cap

    def attention_spec(
        self,
        d_model: int,  # D
        length: int,  # T, and S
        *,
        dtype: str,
        hardware: Hardware,
        causal: bool,
        segments: bool,
        cross: bool = False,
        context_shards: int = 1,  # devices that the tokens are spread over
        mesh_known: bool = False,  # whether it is known how arrays lie on several devices
    ) -> AttentionSpec:
        """What its form is chosen by, when nothing is decoded and no weights are requested."""
        from transformer.attention.backends.choose import AttentionSpec
        from transformer.attention.masks import MaskPattern

        return AttentionSpec(
            hardware=hardware,
            pattern=MaskPattern(causal=causal),
            dtype=dtype,
            num_queries=length,
            num_keys=length,
            head_dim=self.score_head_dim(d_model),
            value_head_dim=self.value_head_dim or self.resolved_head_dim(d_model),
            has_segments=segments,
            keys_match_queries=not cross,
            dot_product_only=self.dot_product_only,
            soft_capped=self.soft_cap > 0
            and dataclasses.replace(self, soft_cap=0.0).dot_product_only,
            has_relative_tables=isinstance(self.position, RelativePositions),
            has_sinks=self.sinks,
            has_dropout=self.dropout > 0,
            context_shards=context_shards,
            mesh_known=mesh_known,
        )

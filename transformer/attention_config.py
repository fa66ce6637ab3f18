"""What can be chosen about full attention."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from transformer import scores
from transformer.checks import check_at_least, check_choice, check_fraction
from transformer.hardware import Hardware
from transformer.layer_configs import MultiHeadConfig
from transformer.positions import AttentionPosition, NoPosition, RelativePositions, RoPE
from transformer.scores import AdditiveScore, AttentionScore, ScaledDotScore

if TYPE_CHECKING:
    from transformer.attend import AttentionSpec


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
        check_at_least("attention.value_width", self.value_head_dim, 0)
        check_at_least("attention.soft_cap", self.soft_cap, 0)
        check_fraction("attention.dropout", self.dropout)
        check_choice("attention.form", self.backend, get_args(Backend))
        of_products = isinstance(self.position, RoPE | RelativePositions)
        if of_products and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"attention.position {type(self.position).__name__}: works in products of queries "
                "and keys, not in an AdditiveScore; give ALiBi, BucketedBias or NoPosition"
            )

    def score_head_dim(self, d_model: int) -> int:
        """H of queries and keys where they meet, and of the keys that a cache keeps."""
        return scores.score_head_dim(self.score, self.resolved_head_dim(d_model))

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
    ) -> "AttentionSpec":
        """What its form is chosen by, when nothing is decoded and no weights are requested."""
        from transformer.attend import AttentionSpec
        from transformer.masks import MaskPattern

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

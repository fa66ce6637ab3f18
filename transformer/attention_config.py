"""What can be chosen about full attention."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from transformer import scores
from transformer.checks import check_choice, check_least, check_share
from transformer.hardware import Hardware
from transformer.layer_configs import HeadsConfig
from transformer.positions import AttentionPosition, NoPosition, RelativePositions, Rotary
from transformer.scores import AdditiveScore, ScaledDotScore, Score

if TYPE_CHECKING:
    from transformer.attend import Case


Form = Literal["auto", "reference", "query_blocks", "blockwise", "cudnn", "splash", "ring"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig(HeadsConfig):
    """Softmax attention: scaled dot-product unless said otherwise (Vaswani et al. 2017)."""

    kind: ClassVar[str] = "full"

    value_width: int = 0
    """H of values; 0 means that of queries."""
    score: Score = ScaledDotScore()
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
    form: Form = "auto"
    """How it is computed; `auto` goes by hardware, dtype and mask."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("attention.value_width", self.value_width, 0)
        check_least("attention.soft_cap", self.soft_cap, 0)
        check_share("attention.dropout", self.dropout)
        check_choice("attention.form", self.form, get_args(Form))
        of_products = isinstance(self.position, Rotary | RelativePositions)
        if of_products and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"attention.position {type(self.position).__name__}: works in products of queries "
                "and keys, not in an AdditiveScore; give ALiBi, BucketedBias or NoPosition"
            )

    def meeting_width(self, width: int) -> int:
        """H of queries and keys where they meet, and of the keys that a cache keeps."""
        return scores.meeting_width(self.score, self.query_width(width))

    @property
    def products(self) -> bool:
        """Whether its scores are products of queries and keys alone."""
        added = not isinstance(self.position, NoPosition | Rotary)
        return not added and not isinstance(self.score, AdditiveScore) and not self.soft_cap

    def case(
        self,
        width: int,  # D
        length: int,  # T, and S
        *,
        dtype: str,
        hardware: Hardware,
        causal: bool,
        segments: bool,
        cross: bool = False,
        parts: int = 1,  # devices that the tokens are spread over
        meshed: bool = False,  # whether it is known how arrays lie on several devices
    ) -> "Case":
        """What its form is chosen by, when nothing is decoded and no weights are requested."""
        from transformer.attend import Case
        from transformer.masks import Pattern

        return Case(
            hardware=hardware,
            pattern=Pattern(causal=causal),
            dtype=dtype,
            queries=length,
            keys=length,
            query_width=self.meeting_width(width),
            value_width=self.value_width or self.query_width(width),
            segments=segments,
            own_keys=not cross,
            products=self.products,
            capped=self.soft_cap > 0 and dataclasses.replace(self, soft_cap=0.0).products,
            relative=isinstance(self.position, RelativePositions),
            sinks=self.sinks,
            dropout=self.dropout > 0,
            parts=parts,
            meshed=meshed,
        )

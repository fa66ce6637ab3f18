"""Settings of the variants of attention. Imports nothing that computes."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.attention.config import Backend, MultiHeadConfig
from transformer.attention.position_config import NoPosition, RoPE
from transformer.validation import check_at_least, check_choice, check_fraction


@dataclasses.dataclass(frozen=True)
class BigBirdConfig(MultiHeadConfig):
    """Each block of queries sees the global blocks, a window and some random blocks.

    Global blocks see everything. They are made of the input's own tokens (the paper's ITC); for
    extra tokens (ETC) put so many before the input and let the first blocks be those.
    """

    kind: ClassVar[str] = "bigbird"
    depends_on_row_index: ClassVar[bool] = True

    block_size: int = 64
    """Tokens of a block. Blocks go by index: packed documents are kept apart, but each sees less
    than it would alone, and only the first has the first blocks."""
    num_global_blocks: int = 1
    """Blocks at the start that are global."""
    last_block_is_global: bool = True
    """Whether the last block that holds a token is global too, as in the paper's code. Not under a
    causal mask: what is last changes as tokens come."""
    num_window_blocks: int = 3
    """Blocks of the window, an odd number: a block itself and as many on each side."""
    num_random_blocks: int = 3
    """r blocks that each head draws for each block, beside the window and the first blocks. Under a
    causal mask those that lie ahead are lost."""
    random_block_span: int = 4096
    """Tokens whose blocks are drawn from: give your longest length. Of a shorter input some of the
    blocks drawn do not exist; of a longer one each stretch of so many tokens draws from itself."""
    seed: int = 0
    """What is drawn follows from it and from the layer."""
    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""
    dropout: float = 0.0
    """Of the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("block_size", 1),
            ("num_global_blocks", 0),
            ("num_random_blocks", 0),
            ("seed", 0),
        ):
            check_at_least(f"bigbird.{name}", getattr(self, name), least)
        check_at_least("bigbird.random_block_span", self.random_block_span, self.block_size)
        check_fraction("bigbird.dropout", self.dropout)
        if self.num_window_blocks < 1 or self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"bigbird.num_window_blocks {self.num_window_blocks}: give an odd number, of a block "
                "itself and as many on each side"
            )


@dataclasses.dataclass(frozen=True)
class LongformerConfig(MultiHeadConfig):
    """Every token sees its window and the global tokens, which see everything (section 3.1).

    What global tokens see they see by projections of their own: `query_global`, `key_global` and
    `value_global`. Other tokens see them by the ordinary ones.
    """

    kind: ClassVar[str] = "longformer"

    one_sided_window: int = 256
    """Keys on each side, w / 2 in the paper's terms, beside the query's own. Under a causal mask
    those behind alone."""
    dilations: tuple[int, ...] = (1,)
    """Steps between the keys of the window, of each head, or one for all."""
    num_global_tokens: int = 1
    """So many tokens at the start of each document are global, such as [CLS], where the mask lists
    no `globals`."""
    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""
    dropout: float = 0.0
    """Of the attention weights."""

    @property
    def receptive_field(self) -> int:
        """Positions from a query to behind the last key of its window: what a cache has to keep."""
        return self.one_sided_window * max(self.dilations) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("longformer.one_sided_window", self.one_sided_window, 0)
        check_at_least("longformer.num_global_tokens", self.num_global_tokens, 0)
        check_fraction("longformer.dropout", self.dropout)
        if len(self.dilations) not in (1, self.num_heads) or min(self.dilations) < 1:
            raise ValueError(
                f"longformer.dilations {self.dilations}: give one number from 1 on, or one for "
                f"each of {self.num_heads} heads"
            )


@dataclasses.dataclass(frozen=True)
class SlidingWindowConfig(MultiHeadConfig):
    """Each query sees the keys less than `window` steps away, itself among them (section 3.1)."""

    kind: ClassVar[str] = "sliding_window"

    window: int = 512
    """W. Under a causal mask W keys, the last ones; without it W - 1 more, ahead."""
    dilation: int = 1
    """Steps are of so many positions: the window reaches as much further, with gaps."""
    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""
    soft_cap: float = 0.0
    """c of c tanh(score / c) (Gemma Team 2024, section 2); 0: none."""
    sinks: bool = False
    """Whether each head learns the score of a key without a value (Agarwal et al. 2025)."""
    dropout: float = 0.0
    """Of the attention weights."""
    backend: Backend = "auto"
    """How it is computed; `blockwise` never visits what lies outside the window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("sliding_window.window", self.window, 1)
        check_at_least("sliding_window.dilation", self.dilation, 1)
        check_at_least("sliding_window.soft_cap", self.soft_cap, 0)
        check_fraction("sliding_window.dropout", self.dropout)
        check_choice("sliding_window.backend", self.backend, get_args(Backend))

    @property
    def receptive_field(self) -> int:
        """Positions from a query to behind the last key that it sees: what a cache has to keep."""
        return (self.window - 1) * self.dilation + 1


SparsePattern = Literal["strided", "fixed"]


Factorization = Literal["merged", "heads", "local", "far"]


HEAD_GROUPS: dict[Factorization, tuple[Factorization, ...]] = {
    "local": ("local",),
    "far": ("far",),
    "merged": ("merged",),
    "heads": ("local", "far"),
}
"""What groups of heads, of one size, look at."""


@dataclasses.dataclass(frozen=True)
class SparseTransformerConfig(MultiHeadConfig):
    """Strided (equation 3) or fixed (equation 4) attention, with a stride near sqrt(T)."""

    kind: ClassVar[str] = "sparse"

    pattern: SparsePattern = "strided"
    """strided: the last l tokens, and every l-th before. fixed: the tokens of the own block of l,
    and the last `summary` of every block."""
    stride: int = 64
    """l."""
    num_summary_tokens: int = 8
    """c of the fixed pattern."""
    factorization: Factorization = "merged"
    """merged: each head looks at both parts; heads: half of them at each part; local or far: one
    part alone, so that layers can take turns (section 5.2)."""
    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sparse.pattern", self.pattern, get_args(SparsePattern))
        check_choice("sparse.factorization", self.factorization, get_args(Factorization))
        check_at_least("sparse.stride", self.stride, 1)
        check_at_least("sparse.num_summary_tokens", self.num_summary_tokens, 1)
        if self.pattern == "fixed" and self.num_summary_tokens > self.stride:
            raise ValueError(
                f"sparse.num_summary_tokens {self.num_summary_tokens}: is more than the stride; give less"
            )
        if self.resolved_num_kv_heads % len(HEAD_GROUPS[self.factorization]):
            raise ValueError(
                f"sparse.num_heads {self.num_heads} (of keys {self.resolved_num_kv_heads}): are odd, and cannot be "
                "halved; give an even number, or another sparse.factorization"
            )

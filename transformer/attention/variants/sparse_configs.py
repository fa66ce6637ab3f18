"""Settings of sparse attention, with fixed patterns or patterns that depend on the content.

Fixed: windows, blocks, strides, global tokens. By content: hashing, clustering, top-k.

Importing this module loads no JAX.
"""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.attention.backends.choose import Backend
from transformer.attention.projections import MultiHeadConfig
from transformer.attention.rope import RoPE
from transformer.attention.scores import ScaledDotScore
from transformer.layers.position_embedding import NoPosition
from transformer.validation import check_at_least, check_choice, check_field_types, check_fraction


@dataclasses.dataclass(frozen=True)
class BigBirdConfig(MultiHeadConfig):
    """Global, window and random blocks (Zaheer et al. 2020, section 2).

    Each block of queries attends to the global blocks, to a window of blocks and to a few random
    blocks. Global blocks attend to everything. They consist of the input's own tokens (the paper's
    ITC). For extra tokens (ETC), prepend them to the input and make their blocks global.
    """

    kind: ClassVar[str] = "bigbird"
    depends_on_row_index: ClassVar[bool] = True

    block_size: int = 64
    """Tokens per block. Blocks are cut by row index. Packed documents stay separate, but each sees
    fewer keys than it would alone, and only the first one contains the first blocks."""
    num_global_blocks: int = 1
    """Number of global blocks at the start of the row."""
    last_block_is_global: bool = True
    """Make the last block with a token global too, as the paper's code does. Ignored under a
    causal mask, where the last block changes as tokens are added."""
    num_window_blocks: int = 3
    """Blocks of the window: an odd number, the query's block and equally many on each side."""
    num_random_blocks: int = 3
    """r, random blocks per head and query block, outside the window and the first global blocks.
    Under a causal mask, random blocks ahead of the query are dropped."""
    random_block_span: int = 4096
    """Tokens whose blocks are drawn from; set it to the longest length. In a shorter input, some
    drawn blocks do not exist. In a longer one, each stretch of this length draws from itself."""
    seed: int = 0
    """Seed of the random blocks, combined with the layer index."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("bigbird.block_size", self.block_size, 1)
        check_at_least("bigbird.num_global_blocks", self.num_global_blocks, 0)
        check_at_least("bigbird.num_random_blocks", self.num_random_blocks, 0)
        check_at_least("bigbird.seed", self.seed, 0)
        check_at_least("bigbird.random_block_span", self.random_block_span, self.block_size)
        check_fraction("bigbird.dropout", self.dropout)
        check_field_types(self, self.kind)
        if self.num_window_blocks < 1 or self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"bigbird.num_window_blocks {self.num_window_blocks}: give an odd number: the "
                "block itself and as many on each side"
            )


@dataclasses.dataclass(frozen=True)
class LongformerConfig(MultiHeadConfig):
    """Sliding window and global tokens (Beltagy et al. 2020, section 3.1).

    Every token attends to its window and to the global tokens. Global tokens attend to all tokens
    through projections of their own: `query_global`, `key_global` and `value_global`.
    """

    kind: ClassVar[str] = "longformer"

    one_sided_window: int = 256
    """Keys on each side of the query, w / 2 in the paper. Under a causal mask: keys before it."""
    dilations: tuple[int, ...] = (1,)
    """Distance between neighboring keys of the window: one for each head, or one for all heads."""
    num_global_tokens: int = 1
    """Global tokens at the start of each document, such as [CLS]. A mask with `global_positions`
    overrides it."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    @property
    def receptive_field(self) -> int:
        """Number of consecutive positions from the query to its most distant key, inclusive.

        A cache must hold this many tokens.
        """
        # The head that looks furthest decides: all heads share one cache.
        return self.one_sided_window * max(self.dilations) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("longformer.one_sided_window", self.one_sided_window, 0)
        check_at_least("longformer.num_global_tokens", self.num_global_tokens, 0)
        check_fraction("longformer.dropout", self.dropout)
        check_field_types(self, self.kind)
        if len(self.dilations) not in (1, self.num_heads) or min(self.dilations) < 1:
            raise ValueError(
                f"longformer.dilations {self.dilations}: give one number from 1 on, or one for "
                f"each of {self.num_heads} heads"
            )


@dataclasses.dataclass(frozen=True)
class SlidingWindowConfig(MultiHeadConfig):
    """Keys less than `window` steps away from the query (Beltagy et al. 2020, section 3.1)."""

    kind: ClassVar[str] = "sliding_window"

    window: int = 512
    """W, in steps. Causal: the query's own key and the W - 1 before it. Otherwise also the W - 1
    keys after it."""
    dilation: int = 1
    """Positions per step. More than 1 widens the window and leaves gaps in it."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""
    score: ScaledDotScore = ScaledDotScore()
    """Score of a query and a key."""
    soft_cap: float = 0.0
    """Soft cap c: c tanh(score / c) limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    sinks: bool = False
    """Add one learned logit per head to the softmax, without a value (Agarwal et al. 2025)."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""
    backend: Backend = "auto"
    """Implementation; `blockwise` skips tiles outside the window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("sliding_window.window", self.window, 1)
        check_at_least("sliding_window.dilation", self.dilation, 1)
        check_at_least("sliding_window.soft_cap", self.soft_cap, 0)
        check_fraction("sliding_window.dropout", self.dropout)
        check_choice("sliding_window.backend", self.backend, get_args(Backend))

    @property
    def receptive_field(self) -> int:
        """Number of consecutive positions from the query to its most distant key, inclusive.

        A cache must hold this many tokens.
        """
        return (self.window - 1) * self.dilation + 1


SparsePattern = Literal["strided", "fixed"]

Factorization = Literal["merged", "heads", "local", "far"]

HEAD_GROUPS: dict[Factorization, tuple[Factorization, ...]] = {
    "local": ("local",),
    "far": ("far",),
    "merged": ("merged",),
    "heads": ("local", "far"),
}
"""Pattern component of each group of heads. All groups have the same number of heads."""


@dataclasses.dataclass(frozen=True)
class SparseTransformerConfig(MultiHeadConfig):
    """Strided (equation 3) or fixed (equation 4) pattern of Child et al. 2019."""

    kind: ClassVar[str] = "sparse"

    pattern: SparsePattern = "strided"
    """strided: the last l tokens, and every l-th token before. fixed: the tokens of the query's
    own block of l tokens, and the last `num_summary_tokens` tokens of every block."""
    stride: int = 64
    """l, near sqrt(T)."""
    num_summary_tokens: int = 8
    """c, summary tokens per block of the fixed pattern."""
    factorization: Factorization = "merged"
    """merged: each head attends to both components. heads: half of the heads attend to each
    component. local or far: one component only, so that layers can alternate (section 5.2)."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sparse.pattern", self.pattern, get_args(SparsePattern))
        check_choice("sparse.factorization", self.factorization, get_args(Factorization))
        check_at_least("sparse.stride", self.stride, 1)
        check_at_least("sparse.num_summary_tokens", self.num_summary_tokens, 1)
        if self.pattern == "fixed" and self.num_summary_tokens > self.stride:
            raise ValueError(
                f"sparse.num_summary_tokens {self.num_summary_tokens}: is more than the stride; "
                "give less"
            )
        # Key heads are divided, and each takes its group of query heads along.
        if self.resolved_num_kv_heads % len(HEAD_GROUPS[self.factorization]):
            raise ValueError(
                f"sparse.num_heads {self.num_heads} (num_kv_heads {self.resolved_num_kv_heads}): "
                "an odd number cannot be split into two halves; give an even number, or another "
                "sparse.factorization"
            )

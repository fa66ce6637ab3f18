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
from transformer.validation import check_at_least, check_choice, check_fraction, check_settings


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
        check_settings(self)
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
        check_settings(self)
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


@dataclasses.dataclass(frozen=True)
class SharedQueryKeyConfig(MultiHeadConfig):
    """Settings of mixers that use one projection for queries and keys, so that N = K."""

    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolved_num_kv_heads != self.num_heads:
            raise ValueError(
                f"{self.kind}.num_kv_heads {self.num_kv_heads}: queries and keys are the same "
                "here, so both have num_heads; leave it at 0"
            )
        check_settings(self)
        if self.qk_norm is not None:
            raise ValueError(
                f"{self.kind}.qk_norm {self.qk_norm.kind}: this mixer normalizes its keys itself; "
                "leave it at None"
            )


@dataclasses.dataclass(frozen=True)
class ReformerConfig(SharedQueryKeyConfig):
    """Attention by locality-sensitive hashing, with shared queries and keys (Kitaev et al. 2020).

    Difference from the paper: it sorts tokens by bucket and cuts the sorted row into chunks, and
    each chunk attends to itself and to the previous one. A later token then moves the chunk
    boundaries and changes which keys earlier queries see, so the choice of keys leaks the future
    under a causal mask. Here a query sees the last `window` members of its bucket, which depend on
    the past only. Packed documents use the same hashes but separate buckets.
    """

    kind: ClassVar[str] = "reformer"

    num_buckets: int = 32
    """Buckets per hash; an even number."""
    num_hashes: int = 4
    """Number of hash rounds. A query sees the keys that any round puts into its bucket."""
    window: int = 64
    """Members of its bucket that a query sees per round, including itself. Without a causal mask,
    also the window - 1 members after it."""
    seed: int = 0
    """Seed of the random rotations, combined with the layer index."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("reformer.num_buckets", self.num_buckets, 2)
        check_at_least("reformer.num_hashes", self.num_hashes, 1)
        check_at_least("reformer.window", self.window, 1)
        check_at_least("reformer.seed", self.seed, 0)
        if self.num_buckets % 2:
            raise ValueError(
                f"reformer.num_buckets {self.num_buckets}: buckets come in opposite pairs; give "
                "an even number"
            )


@dataclasses.dataclass(frozen=True)
class RoutingAttentionConfig(SharedQueryKeyConfig):
    """Attention within k-means clusters of queries and keys (Roy et al. 2021, section 4.1).

    Differences from the paper:
    - The paper gives each cluster its nearest tokens of the whole row, under a causal mask too. A
      later token can then displace an earlier one, which leaks the future. Here, unless
      `balanced`, each token joins its nearest centroid and a query sees the last members of its
      cluster, which depend on the past only.
    - The paper updates centroids by moving averages. Here an auxiliary loss trains them.
    - The paper gives half of the heads a local window. Here, alternate with layers of
      `sliding_window`.
    """

    kind: ClassVar[str] = "routing"

    num_clusters: int = 16
    """E, clusters per head. The paper recommends about sqrt(T)."""
    window: int = 256
    """Members of its cluster that a query sees, including itself: the last ones under a causal
    mask, otherwise also the window - 1 after it. With `balanced`: the size of a cluster."""
    balanced: bool = False
    """Give each cluster its `window` nearest queries and keys (algorithm 1). Not under a causal
    mask. Keys get a projection of their own. A query in several clusters attends to the keys of
    all of them in one softmax; a query in none gets zeros. Padding joins no cluster. Packed
    documents would displace each other's tokens, so segments are rejected unless each row is known
    to hold one document, as in a classifier."""
    centroid_loss_weight: float = 0.01
    """Weight of the loss that pulls each centroid to the mean of its tokens. Centroids get no other
    gradient, and tokens get none from this loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("routing.num_clusters", self.num_clusters, 1)
        check_at_least("routing.window", self.window, 1)
        check_at_least("routing.centroid_loss_weight", self.centroid_loss_weight, 0)

    @property
    def ignores_padding(self) -> bool:
        return self.balanced


@dataclasses.dataclass(frozen=True)
class TopKConfig(MultiHeadConfig):
    """Softmax over the k highest scores of each query among the visible keys (Gupta et al. 2021).

    All scores are computed, one block of queries at a time: time O(T^2), memory O(T). Ties go to
    the key with the lower index.
    """

    kind: ClassVar[str] = "top_k"

    keys_per_query: int = 64
    """k, keys that a query attends to. A query that sees fewer keys attends to all of them."""
    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys. Cross attention ignores it."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("top_k.keys_per_query", self.keys_per_query, 1)
        check_fraction("top_k.dropout", self.dropout)

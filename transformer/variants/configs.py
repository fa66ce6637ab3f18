"""Settings of the variants of attention. Imports nothing that computes."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.attention_config import Backend
from transformer.checks import check_at_least, check_choice, check_fraction
from transformer.layer_configs import MixerConfig, MultiHeadConfig
from transformer.positions import AttentionPosition, NoPosition, RoPE


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
        for name, least in (("block", 1), ("global_blocks", 0), ("random_blocks", 0), ("seed", 0)):
            check_at_least(f"bigbird.{name}", getattr(self, name), least)
        check_at_least("bigbird.span", self.random_block_span, self.block_size)
        check_fraction("bigbird.dropout", self.dropout)
        if self.num_window_blocks < 1 or self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"bigbird.window_blocks {self.num_window_blocks}: give an odd number, of a block "
                "itself and as many on each side"
            )


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
        for name in ("length", "rank", "documents"):
            check_at_least(f"linformer.{name}", getattr(self, name), 1)
        check_choice("linformer.sharing", self.sharing, get_args(ProjectionSharing))
        check_fraction("linformer.dropout", self.dropout)


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
        check_at_least("longformer.window", self.one_sided_window, 0)
        check_at_least("longformer.global_tokens", self.num_global_tokens, 0)
        check_fraction("longformer.dropout", self.dropout)
        if len(self.dilations) not in (1, self.num_heads) or min(self.dilations) < 1:
            raise ValueError(
                f"longformer.dilations {self.dilations}: give one number from 1 on, or one for "
                f"each of {self.num_heads} heads"
            )


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
        check_at_least("performer.features", self.num_features, 1)
        check_choice("performer.feature_map", self.feature_map, get_args(FeatureMapKind))
        if self.feature_map == "trigonometric" and self.num_features % 2:
            raise ValueError(
                f"performer.features {self.num_features}: sines and cosines come in pairs; "
                "give an even number"
            )
        for name in ("seed", "redraw"):
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
        check_at_least("primer.heads", self.num_heads, 1)
        check_at_least("primer.head_width", self.head_dim, 0)
        check_fraction("primer.dropout", self.dropout)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    def resolved_head_dim(self, width: int) -> int:
        """H for a model of width D. Raises ValueError if D / N is needed and is no integer."""
        if not self.head_dim and width % self.num_heads:
            raise ValueError(
                f"primer.heads {self.num_heads}: does not divide the width {width}; "
                "give a divisor of it, or set head_width"
            )
        return self.head_dim or width // self.num_heads


@dataclasses.dataclass(frozen=True)
class SharedQueryKeyConfig(MultiHeadConfig):
    """What their configurations have in common: a head of keys for each of queries."""

    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolved_num_kv_heads != self.num_heads:
            raise ValueError(
                f"{self.kind}.kv_heads {self.num_kv_heads}: queries are keys too, so there are as many "
                "heads of both; leave it at 0"
            )
        if self.qk_norm is not None:
            raise ValueError(
                f"{self.kind}.qk_norm {self.qk_norm.kind}: it has a norm of its own; leave it at "
                "None"
            )


@dataclasses.dataclass(frozen=True)
class ReformerConfig(SharedQueryKeyConfig):
    """Attention by locality-sensitive hashing, with shared queries and keys.

    The paper sorts tokens by bucket and cuts the sorted row into chunks, each of which looks at
    itself and one back. So a later token moves chunk boundaries, and with them what earlier ones
    see: under a causal mask the future leaks through the choice of keys. Here a query sees the last
    `window` members of its bucket instead, which only the past decides. Documents of a pack are
    hashed alike but never meet.
    """

    kind: ClassVar[str] = "reformer"

    num_buckets: int = 32
    """An even number, of one hash."""
    num_hashes: int = 4
    """Hashes; a query sees what any of them brings together with it."""
    window: int = 64
    """Members of its bucket that a query sees in a round, itself among them. Without a causal mask
    as many of those after it."""
    seed: int = 0
    """Of the rotations, together with the layer's number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("buckets", 2), ("rounds", 1), ("window", 1), ("seed", 0)):
            check_at_least(f"reformer.{name}", getattr(self, name), least)
        if self.num_buckets % 2:
            raise ValueError(
                f"reformer.buckets {self.num_buckets}: half of them are opposite to the others; "
                "give an even number"
            )


@dataclasses.dataclass(frozen=True)
class RoutingAttentionConfig(SharedQueryKeyConfig):
    """Attention within clusters of layer-normed queries and keys (section 4.1 of the paper).

    The paper gives each cluster the tokens of the whole row that are nearest to it, under a causal
    mask too: then a later token may take an earlier one's place, and the future leaks. Here, unless
    `balanced`, each token goes to its nearest centroid, and a query sees the last members of its
    cluster, which only the past decides. The paper moves centroids by moving averages; here the
    gradient of an auxiliary loss does. There, half of the heads look at a local window in place of
    a cluster: give layers of `sliding_window` between.
    """

    kind: ClassVar[str] = "routing"

    num_clusters: int = 16
    """E, of each head. The paper advises sqrt(T)."""
    window: int = 256
    """Members of its cluster that a query sees, itself among them: the last ones under a causal
    mask, without it as many after it too. Balanced: the size of a cluster."""
    balanced: bool = False
    """Whether each cluster takes the `window` queries and keys nearest to it (algorithm 1). Without
    a causal mask alone; keys have a projection of their own. A query in several clusters sees the
    keys of all in one softmax, one in no cluster gets zeros. Padding is in none and takes no place:
    a padded row is the same as without. Documents of a pack would take places from each other, so
    segments are refused where it is not known that a row is one document, as a classifier's is."""
    centroid_loss_weight: float = 0.01
    """Coefficient of the loss that draws each centroid to the mean of its tokens. It is the only
    gradient that centroids have, and none of the tokens' own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("clusters", 1), ("window", 1), ("centroid_loss", 0)):
            check_at_least(f"routing.{name}", getattr(self, name), least)


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
        check_choice("sliding_window.form", self.backend, get_args(Backend))

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
        check_choice("sparse.factor", self.factorization, get_args(Factorization))
        check_at_least("sparse.stride", self.stride, 1)
        check_at_least("sparse.summary", self.num_summary_tokens, 1)
        if self.pattern == "fixed" and self.num_summary_tokens > self.stride:
            raise ValueError(
                f"sparse.summary {self.num_summary_tokens}: is more than the stride; give less"
            )
        if self.resolved_num_kv_heads % len(HEAD_GROUPS[self.factorization]):
            raise ValueError(
                f"sparse.heads {self.num_heads} (of keys {self.resolved_num_kv_heads}): are odd, and cannot be "
                "halved; give an even number, or another sparse.factor"
            )


@dataclasses.dataclass(frozen=True)
class TopKConfig(MultiHeadConfig):
    """Softmax over the k highest scores of each query, of those that the mask shows.

    Of equal scores the keys that stand first are taken. All scores are computed, so it takes time
    in T^2, but a block of queries at a time: memory is linear in T.
    """

    kind: ClassVar[str] = "top_k"

    keys_per_query: int = 64
    """k. A query that sees no more keys than this has all of them."""
    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions. A memory's are not known."""
    dropout: float = 0.0
    """Of the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("top_k.chosen", self.keys_per_query, 1)
        check_fraction("top_k.dropout", self.dropout)

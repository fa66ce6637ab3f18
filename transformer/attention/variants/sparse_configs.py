"""Settings of sparse attention whose pattern depends on the content: hashing, clustering, top-k.

Importing this module loads no JAX.
"""

import dataclasses
from typing import ClassVar

from transformer.attention.attention_config import MultiHeadConfig
from transformer.attention.position_config import NoPosition, RoPE
from transformer.validation import check_at_least, check_field_types, check_fraction


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
        check_field_types(self, self.kind)
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

"""Settings of the variants of attention. Imports nothing that computes."""

import dataclasses
from typing import ClassVar

from transformer.attention.config import MultiHeadConfig
from transformer.attention.position_config import NoPosition, RoPE
from transformer.validation import check_at_least, check_fraction


@dataclasses.dataclass(frozen=True)
class SharedQueryKeyConfig(MultiHeadConfig):
    """What their configurations have in common: a head of keys for each of queries."""

    position: NoPosition | RoPE = NoPosition()
    """What queries and keys know of each other's positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolved_num_kv_heads != self.num_heads:
            raise ValueError(
                f"{self.kind}.num_kv_heads {self.num_kv_heads}: queries are keys too, so there are as many "
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
        for name, least in (("num_buckets", 2), ("num_hashes", 1), ("window", 1), ("seed", 0)):
            check_at_least(f"reformer.{name}", getattr(self, name), least)
        if self.num_buckets % 2:
            raise ValueError(
                f"reformer.num_buckets {self.num_buckets}: half of them are opposite to the others; "
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
        for name, least in (("num_clusters", 1), ("window", 1), ("centroid_loss_weight", 0)):
            check_at_least(f"routing.{name}", getattr(self, name), least)


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
        check_at_least("top_k.keys_per_query", self.keys_per_query, 1)
        check_fraction("top_k.dropout", self.dropout)

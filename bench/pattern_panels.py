"""Panels of `bench.patterns`: every mixer with a pattern, at sizes small enough to see it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformer import (
    AttentionConfig,
    BigBirdConfig,
    LongformerConfig,
    MixerConfig,
    ReformerConfig,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)

LENGTH = 64
ONE: Any = dict(num_heads=1, head_dim=16)

HIDDEN, UNSEEN, ALL, NEAR, FAR, RANDOM, CHOSEN = range(7)
"""Reasons why a query sees a key or not."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """Mixer and the parts of its pattern."""

    kind: str
    name: str
    """Paper's name of the pattern."""
    parts: Mapping[int, MixerConfig]
    """For each part, in order, a mixer with this part and the earlier ones only."""
    packed: bool = False
    """True if the row holds two documents."""
    can_be_causal: bool = True


def panels() -> list[Panel]:
    """Return every panel, with sizes at which its pattern is visible."""
    window = LongformerConfig(one_sided_window=4, num_global_tokens=0, **ONE)
    dilated = dataclasses.replace(window, dilations=(3,))
    globals_too = dataclasses.replace(window, num_global_tokens=2)
    bigbird = BigBirdConfig(block_size=4, num_random_blocks=2, random_block_span=LENGTH, **ONE)
    first = dataclasses.replace(bigbird, num_random_blocks=0)
    blocks = dataclasses.replace(first, num_global_blocks=0, last_block_is_global=False)
    strided = SparseTransformerConfig(stride=8, **ONE)
    fixed = dataclasses.replace(strided, pattern="fixed", num_summary_tokens=2)
    routing = RoutingAttentionConfig(num_clusters=6, window=8, **ONE)
    balanced = dataclasses.replace(routing, window=11, balanced=True)
    hashed = ReformerConfig(num_buckets=8, num_hashes=2, window=6, **ONE)
    return [
        Panel("full", "full attention", {ALL: AttentionConfig(**ONE)}),
        Panel("sliding_window", "sliding window", {NEAR: SlidingWindowConfig(window=6, **ONE)}),
        Panel(
            "sliding_window",
            "dilated sliding window",
            {NEAR: SlidingWindowConfig(window=5, dilation=4, **ONE)},
        ),
        Panel("longformer", "sliding window", {NEAR: window}),
        Panel("longformer", "dilated sliding window", {NEAR: dilated}),
        Panel("longformer", "global + sliding window", {NEAR: window, FAR: globals_too}),
        Panel(
            "longformer", "the same, two documents", {NEAR: window, FAR: globals_too}, packed=True
        ),
        Panel("bigbird", "random + window + global", {NEAR: blocks, FAR: first, RANDOM: bigbird}),
        Panel("sparse", "strided", {NEAR: local(strided), FAR: strided}),
        Panel("sparse", "fixed", {NEAR: local(fixed), FAR: fixed}),
        Panel("top_k", "top-k", {CHOSEN: TopKConfig(keys_per_query=8, **ONE)}),
        Panel("reformer", "LSH, 2 rounds", {CHOSEN: hashed}),
        Panel("routing", "clusters, last members", {CHOSEN: routing}),
        Panel("routing", "k-means clusters, balanced", {CHOSEN: balanced}, can_be_causal=False),
    ]


def local(config: SparseTransformerConfig) -> SparseTransformerConfig:
    """Return the config without the far part."""
    return dataclasses.replace(config, factorization="local")

from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.variants.sparse_configs import (
    BigBirdConfig,
    LongformerConfig,
    ReformerConfig,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (BigBirdConfig, dict(num_heads=0)),
        (BigBirdConfig, dict(block_size=0)),
        (BigBirdConfig, dict(num_window_blocks=2)),
        (BigBirdConfig, dict(random_block_span=16)),
        (LongformerConfig, dict(num_heads=0)),
        (LongformerConfig, dict(dilations=(1, 2), num_heads=3)),
        (LongformerConfig, dict(one_sided_window=-1)),
        (LongformerConfig, dict(num_global_tokens=-1)),
        (ReformerConfig, dict(num_heads=0)),
        (ReformerConfig, dict(num_buckets=3)),
        (ReformerConfig, dict(num_hashes=0)),
        (ReformerConfig, dict(num_kv_heads=1)),
        (RoutingAttentionConfig, dict(num_heads=0)),
        (RoutingAttentionConfig, dict(window=0)),
        (RoutingAttentionConfig, dict(num_clusters=0)),
        (RoutingAttentionConfig, dict(num_kv_heads=1)),
        (SlidingWindowConfig, dict(num_heads=0)),
        (SlidingWindowConfig, dict(window=0)),
        (SlidingWindowConfig, dict(dilation=0)),
        (SlidingWindowConfig, dict(dropout=1.0)),
        (SlidingWindowConfig, dict(backend="fast")),
        (SparseTransformerConfig, dict(num_heads=0)),
        (SparseTransformerConfig, dict(pattern="spiral")),
        (SparseTransformerConfig, dict(stride=0)),
        (SparseTransformerConfig, dict(num_summary_tokens=5, pattern="fixed", stride=4)),
        (SparseTransformerConfig, dict(num_heads=3, factorization="heads")),
        (TopKConfig, dict(num_heads=0)),
        (TopKConfig, dict(keys_per_query=0)),
        (TopKConfig, dict(dropout=1.0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)

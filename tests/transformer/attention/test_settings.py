"""Settings of attention, its positions and its variants that cannot be meant are refused."""

from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.full import AttentionConfig
from transformer.attention.masks import MaskPattern
from transformer.attention.position_bias import RelativePositions, T5RelativeBias
from transformer.attention.rope import LinearScaling, Llama3Scaling, NTKScaling, RoPE, YaRNScaling
from transformer.attention.scores import AdditiveScore
from transformer.attention.variants.bigbird import BigBirdConfig
from transformer.attention.variants.latent_attention import LatentAttentionConfig
from transformer.attention.variants.linformer import LinformerConfig
from transformer.attention.variants.longformer import LongformerConfig
from transformer.attention.variants.performer import PerformerConfig
from transformer.attention.variants.primer import PrimerConfig
from transformer.attention.variants.reformer import ReformerConfig
from transformer.attention.variants.routing_attention import RoutingAttentionConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.attention.variants.sparse_transformer import SparseTransformerConfig
from transformer.attention.variants.top_k import TopKConfig


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (AttentionConfig, dict(num_heads=0)),
        (AttentionConfig, dict(num_kv_heads=4, num_heads=6)),
        (AttentionConfig, dict(num_kv_heads=-1)),
        (AttentionConfig, dict(head_dim=-8)),
        (AttentionConfig, dict(value_head_dim=-8)),
        (AttentionConfig, dict(dropout=1.0)),
        (AttentionConfig, dict(backend="flash")),
        (AttentionConfig, dict(position=RoPE(), score=AdditiveScore())),
        (AttentionConfig, dict(position=RelativePositions(), score=AdditiveScore())),
        (AdditiveScore, dict(hidden_dim=-1)),
        (MaskPattern, dict(window=-1)),
        (MaskPattern, dict(dilation=0)),
        (RelativePositions, dict(max_distance=-1)),
        (RoPE, dict(fraction=0.0)),
        (RoPE, dict(fraction=1.5)),
        (RoPE, dict(theta=1.0)),
        (RoPE, dict(layout="pairs")),
        (T5RelativeBias, dict(num_buckets=1)),
        (T5RelativeBias, dict(num_buckets=7)),
        (T5RelativeBias, dict(num_buckets=6, bidirectional=True)),
        (T5RelativeBias, dict(max_distance=16)),
        (T5RelativeBias, dict(max_distance=2**20 + 1)),
        (LinearScaling, dict(factor=0.5)),
        (NTKScaling, dict(factor=0.5)),
        (YaRNScaling, dict(original_max_length=0)),
        (YaRNScaling, dict(beta_slow=32.0)),
        (YaRNScaling, dict(mscale=0.7)),
        (Llama3Scaling, dict(low_freq_factor=0.0)),
        (LatentAttentionConfig, dict(num_heads=0)),
        (LatentAttentionConfig, dict(rope_head_dim=3)),
        (LatentAttentionConfig, dict(position=RoPE(fraction=0.5))),
        (LinformerConfig, dict(num_heads=0)),
        (LinformerConfig, dict(max_length=0)),
        (LinformerConfig, dict(rank=0)),
        (LinformerConfig, dict(max_documents=0)),
        (LinformerConfig, dict(sharing="layers")),
        (PerformerConfig, dict(num_features=0)),
        (PerformerConfig, dict(num_features=7, feature_map="trigonometric")),
        (PerformerConfig, dict(feature_map="cosine")),
        (PerformerConfig, dict(redraw_index=-1)),
        (PerformerConfig, dict(num_heads=0)),
        (PrimerConfig, dict(num_heads=0)),
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

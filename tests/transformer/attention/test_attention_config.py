from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.attention_config import AdditiveScore, AttentionConfig
from transformer.attention.position_config import RelativePositions, RoPE


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
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)

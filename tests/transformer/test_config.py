from typing import Any

import pytest

from tests.transformer.refused import assert_refused
from transformer.attention.full import AttentionConfig
from transformer.layers.moe import MoEConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=3))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (TransformerConfig, dict(d_model=0)),
        (TransformerConfig, dict(num_layers=0)),
        (TransformerConfig, dict(num_layers=1, layer_pattern=(BLOCK,) * 3)),
        (TransformerConfig, dict(layer_pattern=())),
        (TransformerConfig, dict(pad_vocab_to_multiple=0)),
        (TransformerConfig, dict(logit_scale=0.0)),
        (TransformerConfig, dict(remat="half")),
        (BlockConfig, dict(norm_placement="before")),
        (BlockConfig, dict(residual_dropout=1.0)),
    ],
)
def test_settings_are_checked(config: Any, fields: dict[str, Any]) -> None:
    assert_refused(config, fields)


def test_parts_of_a_model_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="num_heads 3: does not divide the width 11"):
        TransformerConfig(d_model=11, layer_pattern=(BLOCK,))
    limited = BlockConfig(feed_forward=MoEConfig(capacity_factor=1.0))
    with pytest.raises(ValueError, match=r"capacity_factor .* lets later tokens"):
        TransformerConfig(layer_pattern=(limited,))
    TransformerConfig(layer_pattern=(limited,), causal=False)

"""Full attention passes the mixer contract with every position encoding, score and QK norm."""

import pytest

from transformer import (
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BilinearScore,
    DotScore,
    NormConfig,
    RelativePositions,
    RoPE,
    T5RelativeBias,
    YaRNScaling,
)
from transformer.testing.contract import check_mixer

CONFIGS = {
    "rotary": AttentionConfig(
        num_heads=2,
        position=RoPE(layout="interleaved", scaling=YaRNScaling(2.0, 16)),
        qk_norm=NormConfig("rms"),
    ),
    "relative, bilinear": AttentionConfig(
        num_heads=4, num_kv_heads=2, position=RelativePositions(3), score=BilinearScore()
    ),
    "buckets, additive": AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=3,
        value_head_dim=5,
        position=T5RelativeBias(8, 20),
        score=AdditiveScore(7),
    ),
    "ALiBi, dot": AttentionConfig(
        num_heads=6, position=ALiBi(), score=DotScore(), qk_norm=NormConfig("layer")
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_mixer_contract(name: str) -> None:
    check_mixer(CONFIGS[name], d_model=12, length=17, lengths=(1, 23))

"""Attention keeps the contract of mixers with every kind of position, score and QK norm."""

import pytest

from transformer import (
    AdditiveScore,
    ALiBi,
    AttentionConfig,
    BilinearScore,
    BucketedBias,
    DotScore,
    NormConfig,
    RelativePositions,
    Rotary,
    YaRNScaling,
)
from transformer.testing import check_mixer

CONFIGS = {
    "rotary": AttentionConfig(
        heads=2,
        position=Rotary(layout="interleaved", scaling=YaRNScaling(2.0, 16)),
        qk_norm=NormConfig("rms"),
    ),
    "relative, bilinear": AttentionConfig(
        heads=4, kv_heads=2, position=RelativePositions(3), score=BilinearScore()
    ),
    "buckets, additive": AttentionConfig(
        heads=4,
        kv_heads=2,
        head_width=3,
        value_width=5,
        position=BucketedBias(8, 20),
        score=AdditiveScore(7),
    ),
    "ALiBi, dot": AttentionConfig(
        heads=6, position=ALiBi(), score=DotScore(), qk_norm=NormConfig("layer")
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_the_contract(name: str) -> None:
    check_mixer(CONFIGS[name], width=12, length=17, lengths=(1, 23))

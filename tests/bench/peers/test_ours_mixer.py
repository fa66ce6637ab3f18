"""Our side of the mixer race: the mixer built from the settings, and that it runs."""

import pytest

from bench.peers.ours_mixer import build, config_of
from transformer import BigBirdConfig, LongformerConfig

SETTINGS = {
    "mixer": "longformer",
    "length": 24,
    "width": 14,
    "heads": 2,
    "window": 3,
    "block": 4,
    "threads": 1,
}


def test_requested_mixer_is_built() -> None:
    assert config_of(SETTINGS) == LongformerConfig(num_heads=2, one_sided_window=3)
    asked = config_of({**SETTINGS, "mixer": "bigbird"})
    assert asked == BigBirdConfig(num_heads=2, block_size=4, random_block_span=24)


@pytest.mark.sampled("bigbird")
@pytest.mark.parametrize("mixer", ["longformer", "bigbird"])
def test_mixer_runs_with_as_many_parameters_as_the_peer(mixer: str) -> None:
    work = build({**SETTINGS, "mixer": mixer})
    work.run(2)
    matrices = 7 if mixer == "longformer" else 4  # 14 x 14, each with a bias
    assert work.facts["parameters"] == matrices * (14 * 14 + 14)
    assert work.peak_memory() >= 0

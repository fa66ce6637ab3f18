"""Our side of the race: the experiment built from the settings, and that it trains."""

import math
import sys

import numpy as np
import pytest

from bench.contender import Contender, running
from bench.peers.ours import experiment_of, random_rows
from train.optim.elementwise import AdamW
from transformer import FeedForwardConfig, NormConfig

SETTINGS = {
    "layers": 1,
    "width": 14,
    "heads": 2,
    "context": 5,
    "batch": 3,
    "vocabulary": 11,
    "gelu": "erf",
    "learning_rate": 6e-4,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "clip": 1.0,
    "threads": 1,
    "precision": "float32",
}


def test_experiment_is_gpt2_with_default_settings() -> None:
    experiment = experiment_of(SETTINGS)
    (block,) = experiment.model.layer_pattern
    assert block.feed_forward == FeedForwardConfig(activation="gelu")
    assert (block.norm_placement, block.norm, block.residual_dropout) == (
        "pre",
        NormConfig("layer"),
        0.0,
    )
    assert experiment.model.tie_embeddings
    assert experiment.model.precision.name == "float32"
    assert experiment.model.layer_loop == "auto"
    assert isinstance(experiment.optimizer, AdamW)
    assert (experiment.optimizer.max_grad_norm, experiment.optimizer.weight_decay) == (1.0, 0.1)
    narrow = experiment_of({**SETTINGS, "precision": "bfloat16"})
    assert narrow.model.precision.name == "bfloat16"
    tanh = experiment_of({**SETTINGS, "gelu": "tanh"})
    feed_forward = tanh.model.layer_pattern[0].feed_forward
    assert isinstance(feed_forward, FeedForwardConfig)
    assert feed_forward.activation == "gelu_tanh"


def test_rows_are_random_and_targets_are_next_tokens() -> None:
    generator = np.random.default_rng(0)
    first, second = (random_rows(generator, SETTINGS, start) for start in (0, 3))
    assert first["tokens"].shape == first["targets"].shape == first["weights"].shape == (3, 5)
    np.testing.assert_array_equal(first["tokens"][:, 1:], first["targets"][:, :-1])
    assert not np.array_equal(first["tokens"], second["tokens"])
    assert first["tokens"].max() < 11
    assert second["examples"].tolist() == [3, 4, 5]


@pytest.mark.nightly
def test_contender_trains() -> None:
    contender = Contender("ours", (sys.executable, "-m", "bench.peers.ours"), SETTINGS)
    with running(contender, warmup=1) as runner:
        runner.wait_until_ready()
        runner.turn(2)
        record = runner.finish()
    (loss,) = record.losses
    assert loss is not None
    assert abs(loss - math.log(11)) < 0.2
    width, layers = 14, 1
    by_hand = (11 + 5) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert record.facts["parameters"] == by_hand

"""A model with experts trains like any other."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.support import assert_close, random_rows, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.engines.engine import Engine
from train.experiment import Experiment
from train.optim.elementwise import AdamW
from train.parallel.mesh import MeshConfig
from transformer import FeedForwardConfig, Hardware
from transformer.layers.moe import MoEConfig

VOCAB = 30
LOSSES = {"loss/load_balance", "loss/router_z"}


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    experiment = tiny(folder, num_layers=1, **changes)
    mixture = MoEConfig(
        4, 2, FeedForwardConfig(24, "silu", gated=True), load_balance_loss_weight=0.1
    )
    pattern = tuple(
        dataclasses.replace(block, feed_forward=mixture) for block in experiment.model.layer_pattern
    )
    model = dataclasses.replace(experiment.model, layer_pattern=pattern, vocab_size=VOCAB)
    # AdamW with its usual epsilon takes steps of full size along gradients that are almost zero,
    # and so of the rounding of sums; with this one, its steps follow the gradients.
    optimizer = AdamW(epsilon=1e-3)
    return dataclasses.replace(experiment, model=model, optimizer=optimizer)


def trained(engine: Engine) -> tuple[list[dict[str, float]], Any]:
    """Train three steps on windows in which all tokens have equal weight."""
    state, metrics = engine.init(), []
    for cursor in range(3):
        rows = random_rows(8, VOCAB, cursor=cursor)
        rows["weights"] = np.ones_like(rows["weights"])
        state, result = engine.step(state, engine.put_batch(rows))
        metrics.append({name: float(value) for name, value in result.items()})
    return metrics, jax.tree.map(np.asarray, state.params)


@pytest.mark.full
def test_expert_parallelism_equals_one_device(tmp_path: Path) -> None:
    """Auxiliary losses are means over examples, so they do not depend on how a batch is split."""
    one = make_engine(make_experiment(tmp_path), Hardware())
    expected, params = trained(one)
    assert set(expected[0]) >= LOSSES
    # 0.1 if all experts are used equally
    assert 0.1 <= expected[0]["loss/load_balance"] < 0.15
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    for changes in ({"mesh": mesh, "grad_accum_steps": 2}, {"compile": "pmap"}):
        engine = make_engine(make_experiment(tmp_path, **changes), Hardware(count=8))
        actual, others = trained(engine)
        for metrics, expected_metrics in zip(actual, expected, strict=True):
            assert metrics == pytest.approx(expected_metrics, abs=1e-5)
        assert_close(others, params, 1e-5)

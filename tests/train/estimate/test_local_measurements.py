import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from bench.drills.plan_time import LARGE, SMALL, settings_of
from tests.train.support import tiny
from train.estimate import target
from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.estimate.chips import ATTAINABLE_FRACTION
from train.estimate.compile import random_batch
from train.estimate.target import measure_chip


def test_random_batch_has_valid_fields(tmp_path: Path) -> None:
    experiment = tiny(tmp_path)
    model = dataclasses.replace(experiment.model, vocab_size=24)
    rows = random_batch(dataclasses.replace(experiment, model=model))
    shapes = unsharded_batch_shapes(experiment, experiment.batch_size)
    assert {name: (row.shape, row.dtype) for name, row in rows.items()} == {
        name: (shape.shape, shape.dtype) for name, shape in shapes.items()
    }
    length = max_batch_shape(experiment)[1]
    assert set(np.unique(rows["tokens"])) <= set(range(24))
    assert len(np.unique(rows["tokens"])) > 12
    assert (rows["positions"] == np.arange(length)[None, :]).all()
    assert (rows["weights"] == 1).all()


@pytest.mark.parametrize("case", SMALL + LARGE)
def test_drill_cases_can_be_built(case: str) -> None:
    experiment, notes = settings_of(case)
    assert experiment.model.vocab_size
    assert not notes


def test_measured_chip_has_the_fastest_of_five_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = itertools.cycle([3.0, 2.0, 5.0, 7.0, 4.0])
    readings = (reading for seconds in durations for reading in (0.0, seconds))
    monkeypatch.setattr(target, "MATMUL_SIZE", 8)
    monkeypatch.setattr(target, "COPY_BYTES", 64)
    chip = measure_chip(jax.devices()[0], 12345, lambda: next(readings))
    share = ATTAINABLE_FRACTION * jax.local_device_count()  # devices of a CPU share its cores
    for rate in (
        chip.bf16_flops_per_second,
        chip.fp32_flops_per_second,
        chip.fp16_flops_per_second,
    ):
        assert rate == 2 * 8**3 / 2 / share
    for rate in (chip.memory_bandwidth, chip.link_bandwidth, chip.network_bandwidth):
        assert rate == 2 * 64 / 2 / share
    assert (chip.platform, chip.memory_bytes) == ("cpu", 12345)

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.drills.plan_time import LARGE, SMALL, settings_of
from tests.train.support import tiny
from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.estimate.local_measurements import random_batch


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

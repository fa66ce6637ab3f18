"""A small sample of `bench.drills.damage`: files of a checkpoint, damaged in every way."""

import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.drills.damage import KINDS, apply, cases
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with CheckpointManager(folder, RetentionPolicy(keep_last=2)) as checkpoints:
        for step in (1, 2):
            state = {"w": jnp.full((3, 5), step), "key": jax.random.key(step)}
            checkpoints.save(step, state, {"step": step})
    return folder


@pytest.mark.full
def test_damage_is_detected_and_the_previous_step_restored(folder: Path, tmp_path: Path) -> None:
    like = {"w": jax.ShapeDtypeStruct((3, 5), jnp.int32), "key": jax.eval_shape(jax.random.key, 0)}
    drawn, copy, tried = random.Random(0), tmp_path / "copy", set()
    for kind, file in cases(folder / "2", 1):  # one round
        shutil.copytree(folder, copy)
        apply(kind, copy / "2" / file, drawn)
        with CheckpointManager(copy) as checkpoints:
            assert checkpoints.find_newest_valid().step == 1, (kind, file)
            if kind not in tried:
                restored = checkpoints.restore(1, like)
                assert np.array_equal(restored.state["w"], np.full((3, 5), 1))
        tried.add(kind)
        shutil.rmtree(copy)
    assert tried == KINDS.keys()

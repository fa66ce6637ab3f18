"""What is on disk once a rollback is decided."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from tests.train.support import state_of, tiny
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy
from train.detector import RecoveryConfig
from train.experiment import CheckpointConfig
from train.rollback import Anomaly, Rollback, RollbackManager, RollbackRecord
from train.run_folder.folder import RunFolder

ANOMALY = Anomaly(first_step=15, last_step=16, next_batch=20, reason="loss 9, more than 4")


def make_state(step: int) -> Any:
    state = state_of({"w": jnp.full(3, step)}, optax.identity())
    return state.replace(step=jnp.int32(step))


def make_manager(tmp_path: Path, *, resuming: bool = False) -> tuple[RunFolder, RollbackManager]:
    config = RecoveryConfig(rollback_steps=4, skip_batches=3)
    experiment = tiny(tmp_path, recovery=config, checkpoint=CheckpointConfig(every=8))
    folder = RunFolder.create(tmp_path / "run")
    return folder, RollbackManager(experiment, folder, resuming=resuming)


def test_rollback_goes_to_a_due_checkpoint_whose_save_is_in_progress(tmp_path: Path) -> None:
    folder, rollbacks = make_manager(tmp_path)
    current = make_state(17)
    with CheckpointManager(
        folder.checkpoints, RetentionPolicy(save_every=8, keep_last=2)
    ) as checkpoints:
        checkpoints.save(11, make_state(11), {})  # of a preempted run: not due
        checkpoints.save(8, make_state(8), {})
        rollback = rollbacks.record_rollback(ANOMALY, current, pytest.fail, checkpoints, {})
        assert rollback == Rollback(15, 16, checkpoint=8, cursor=23, rate=1.0, attempts=1)
        for step in (24, 32, 40):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        assert checkpoints.steps() == [8, 32, 40]  # retention leaves it
    assert RollbackRecord.read(folder.rollback_record) == RollbackRecord((rollback,), False)
    assert current.params["w"].is_deleted()
    with CheckpointManager(folder.anomaly_states) as kept:
        assert kept.steps() == [17]


def test_later_checkpoints_are_set_aside_once(tmp_path: Path) -> None:
    """Those that are saved after the rollback stay when the run is resumed."""
    folder, rollbacks = make_manager(tmp_path)
    policy = RetentionPolicy(save_every=8, keep_last=4)
    with CheckpointManager(folder.checkpoints, policy) as checkpoints:
        for step in (8, 16):
            checkpoints.save(step, make_state(step), {})
        rollbacks.record_rollback(ANOMALY, make_state(17), pytest.fail, checkpoints, {})
        rollbacks.set_aside_later_checkpoints(checkpoints)
        assert checkpoints.steps() == [8]
        checkpoints.save(24, make_state(24), {})
        checkpoints.wait()
        resumed = make_manager(tmp_path, resuming=True)[1]
        resumed.set_aside_later_checkpoints(checkpoints)
        assert checkpoints.steps() == [8, 24]


def test_initial_state_is_saved_where_no_checkpoint_is_old_enough(tmp_path: Path) -> None:
    folder, rollbacks = make_manager(tmp_path)
    with CheckpointManager(
        folder.checkpoints, RetentionPolicy(save_every=8, keep_last=2)
    ) as checkpoints:
        checkpoints.save(16, make_state(16), {})
        rollback = rollbacks.record_rollback(
            ANOMALY, make_state(17), lambda: make_state(0), checkpoints, {"corpus": "ab"}
        )
        assert rollback.checkpoint == 0
        assert checkpoints.steps() == [0, 16]
        assert checkpoints.read_metadata(0) == {"corpus": "ab", "rollbacks": 0}

"""A LoRA run rolls back to a checkpoint or to its start, and keeps its base weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from bench.drills.faults import Fault, planted
from tests.train.support import (
    assert_same_bits,
    light_compiler,  # noqa: F401
    lines_of,
    shared_programs,  # noqa: F401
    tiny,
)
from train.checkpoint.tree_paths import named_leaves
from train.detector import RecoveryConfig
from train.engines.lora import LoRAConfig
from train.experiment import CheckpointConfig
from train.optim.schedules import ScheduleConfig

pytestmark = pytest.mark.full

STEPS = 40


def fit(folder: Path, name: str, fault: Fault, every: int) -> train.Run:
    experiment = tiny(
        folder,
        num_layers=1,
        steps=STEPS,
        lora=LoRAConfig(rank=2, targets=("all",)),
        schedule=ScheduleConfig("constant", learning_rate=3e-2, warmup_steps=3),
        checkpoint=CheckpointConfig(every=every),
        recovery=RecoveryConfig(
            window=16, warmup=8, patience=2, rollback_steps=4, skip_batches=3, max_rollbacks=2
        ),
    )
    source = str(folder / "source")
    with planted(fault):
        return train.fit(experiment, str(folder / name), init_from=source, quiet=True)


def test_rollbacks_keep_the_base(tmp_path: Path) -> None:
    experiment = tiny(tmp_path, num_layers=1, steps=100, checkpoint=CheckpointConfig(every=0))
    source = train.fit(experiment, str(tmp_path / "source"), quiet=True)
    before = named_leaves(source.params)
    fault = Fault(first=20, count=3, words=20)
    for name, every, target in (("checkpoint", 8, 16), ("start", 100, 0)):
        run = fit(tmp_path, name, fault, every)
        events = lines_of(tmp_path / name / "logbook.jsonl")
        [event] = [each for each in events if each["event"] == "rolled back"]
        assert event["checkpoint"] == target
        after: Any = named_leaves(train.load(str(tmp_path / name)).params)
        assert_same_bits(after["embedding"], before["embedding"])
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in after.values())
        assert run.final_metrics["loss"] < source.final_metrics["loss"] + 0.1

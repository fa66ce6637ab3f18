"""Runs that are stopped and resumed, for the resume tests."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import train
from tests.train.support import light_compiler as light_compiler
from tests.train.support import tiny
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.experiment import CheckpointConfig, Experiment
from train.optim.schedules import ScheduleConfig
from train.reporter import Reporter
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.local_hardware import local_hardware
from train.runtime.signals import PreemptedError
from train.state import TrainState

STEPS = 12


OnStep = Callable[[int], None]


class CrashError(Exception):
    """Unexpected error."""


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment whose learning rate changes at each step, to reveal a wrong step."""
    settings = {
        "num_layers": 1,
        "steps": STEPS,
        "schedule": ScheduleConfig("cosine", learning_rate=1e-2, warmup_steps=3),
        "checkpoint": CheckpointConfig(every=4, keep_last=3),
    }
    return tiny(folder, **{**settings, **changes})


def kill(number: signal.Signals, at: int) -> OnStep:
    return lambda step: os.kill(os.getpid(), number) if step == at else None


def crash(at: int) -> OnStep:
    def raise_at(step: int) -> None:
        if step == at:
            raise CrashError

    return raise_at


@contextlib.contextmanager
def preempted_after(step: int) -> Iterator[None]:
    """Stop the run that is trained inside by SIGTERM after a step, which saves a checkpoint."""
    log, stop = Reporter.log_training, kill(signal.SIGTERM, step)

    def log_and_stop(self: Reporter, step: int, metrics: dict[str, float]) -> None:
        log(self, step, metrics)
        stop(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "log_training", log_and_stop)
        with pytest.raises(
            PreemptedError, match=f"stopped by SIGTERM at step {step}, checkpoint saved"
        ):
            yield


def state_at(workdir: Path, step: int) -> TrainState:
    """Return the full state of a run at a step, for any mesh."""
    experiment = read_experiment(RunFolder.open_existing(workdir))
    engine = make_engine(experiment, local_hardware())
    with CheckpointManager(workdir / "checkpoints") as checkpoints:
        state: TrainState = checkpoints.restore(step, engine.abstract_state()).state
    return state


def fit(experiment: Experiment, workdir: Path) -> train.Run:
    return train.fit(experiment, str(workdir), quiet=True)


class Uninterrupted(NamedTuple):
    folder: Path
    workdir: Path
    losses: dict[int, float]


def contents(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}

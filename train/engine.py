"""What a compiled training step is to those who call it: the loop, the tasks, the judge.

An engine limits how many of its programs are in flight (`train/dispatch.py`), so its callers may
call `step` and `evaluate` without waiting for their results.
"""

import abc
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.state import TrainState
from train.step import Batch, TrainStep
from transformer.model import Model

Metrics = dict[str, jax.Array]


class Engine(abc.ABC):
    """What the loop calls. States are as a checkpoint holds them: one logical copy."""

    model: Model
    mesh: Mesh
    train_step: TrainStep

    @abc.abstractmethod
    def init(self) -> TrainState:
        """The state before the first step, born where it belongs."""

    @abc.abstractmethod
    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and layout, with nothing allocated."""

    @abc.abstractmethod
    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        """This host's rows of a batch, on the devices."""

    @abc.abstractmethod
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One update. `state` is consumed."""

    @abc.abstractmethod
    def auto_choices(self) -> dict[str, str]:
        """What every `auto` has become here, and why."""

    @abc.abstractmethod
    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        """Sums of the losses of a batch, without dropout."""

"""Interface of a compiled training step, and the settings that it is built from.

The loop and the evaluator call the `Engine` interface. `JitEngine` (`jit_engine.py`) is the one for
any mesh; `PmapEngine` (`pmap_engine.py`) has one replica of the model on each device.

Calls return before their programs have run: while the devices compute one step, the host reads the
next batch and dispatches the next step. Callers need not wait for results, since an engine limits
how many of its programs are in flight (`DispatchLimit`).
"""

import abc
import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.engines.debug_checks import CheckedTrainStep
from train.engines.lora import LoRAConfig
from train.optim.optimizer import Optimizer
from train.optim.optimizer_registry import make_step_optimizer
from train.optim.schedules import LearningRateSchedule
from train.parallel.mesh import MeshConfig
from train.parallel.sharding import place_params
from train.recovery.detector import RecoveryConfig
from train.state import EmaConfig, LossScaleConfig, TrainState
from train.step import Batch, LossFn, Metrics, TrainStep
from transformer.hardware import Hardware
from transformer.layers.low_rank import merge_weights
from transformer.lora import LoRALayout
from transformer.model_context import ActivationConstraint
from transformer.models.model import Model

MakeModel = Callable[[Hardware, ActivationConstraint], Model]
"""Function from the hardware and the placement of activations to a model."""

MakeLossFn = Callable[[Model], LossFn]
"""Function from a model to its loss."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Settings of the training step and of its state, beside the model and the loss."""

    optimizer: Optimizer
    schedule: LearningRateSchedule
    steps: int
    grad_accum_steps: int
    loss_scale: LossScaleConfig
    ema: EmaConfig
    recovery: RecoveryConfig
    lora: LoRAConfig
    mesh: MeshConfig
    seed: int
    debug_checks: bool


def make_train_step(
    config: TrainingConfig,
    loss_fn: LossFn,
    logical_axes: Any,
    width: int,
    axis_name: str | None = None,
) -> TrainStep:
    """Return the training step.

    Args:
      config: The settings.
      loss_fn: The loss.
      logical_axes: Tree of `LogicalAxes` with the structure of the trained parameters.
      width: Width of the model, D, which some schedules depend on.
      axis_name: The mapped axis to sum gradients over, if the step is compiled by `pmap`.
    """
    step_class = CheckedTrainStep if config.debug_checks else TrainStep
    return step_class(
        loss_fn=loss_fn,
        optimizer=make_step_optimizer(
            config.optimizer, logical_axes, config.mesh.optimizer_placement
        ),
        schedule=config.schedule.make(steps=config.steps, width=width),
        max_grad_norm=config.optimizer.max_grad_norm,
        grad_accum_steps=config.grad_accum_steps,
        loss_scale=config.loss_scale,
        axis_name=axis_name,
        ema_decay=config.ema.decay,
        recovery=config.recovery,
    )


MAX_PROGRAMS_IN_FLIGHT = 8
"""Unfinished programs allowed when a dispatch returns, where nothing else limits them: enough to
keep a device busy while the host is held up, few enough to keep their batches in device memory."""


def max_programs_in_flight(hardware: Hardware, mesh: Mesh) -> int:
    """Return how many programs over a mesh may be unfinished when a dispatch returns.

    0 on several CPU devices. Fewer than 32 would avoid the deadlock of `DispatchLimit`, but other
    programs (those of samples, for example) count too, and a CPU computes no faster with more than
    one in flight: all of them share its cores.
    """
    is_multi_cpu = hardware.platform == "cpu" and mesh.size > 1
    return 0 if is_multi_cpu else MAX_PROGRAMS_IN_FLIGHT


class DispatchLimit:
    """Queue of dispatched programs that waits for the oldest when it is full.

    JAX dispatches asynchronously: a call returns before its program has run, and the host prepares
    the next one meanwhile. Two things bound how many programs may be in flight:

    - A deadlock on CPU. XLA's CPU client runs the programs of all its devices on one thread pool,
      and a collective blocks a thread for each device until all have arrived. A device accepts 32
      programs. Dispatching one more blocks threads of that same pool until a program ends, and the
      next program lacks threads and never ends (docs/sharding.md, "Several devices on one CPU").
    - Memory. Programs in flight keep their inputs on the device: without a bound, an evaluation
      would hold all batches of its split.

    Copies between host and devices use the pool too, but wait for nothing: a few at a time, as
    `train/data/batches.py` prefetches them, only delay a program; an endless stream starves it.
    """

    def __init__(self, max_in_flight: int):
        self._max_in_flight = max_in_flight
        self._in_flight: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Register a dispatched program, and wait until at most `max_in_flight` are unfinished.

        `outputs` are arrays that no later program takes as donated inputs. Any of the program's
        will do: all of them become ready together.
        """
        self._in_flight.append(outputs)
        while len(self._in_flight) > self._max_in_flight:
            jax.block_until_ready(self._in_flight.popleft())


class Engine(abc.ABC):
    """Interface of a compiled training step.

    States are those of a checkpoint: one logical copy of every array, however it is placed.
    """

    model: Model
    mesh: Mesh
    train_step: TrainStep
    lora: LoRALayout | None = None
    """Layout of the trainable weights of a LoRA run; None: all weights are trained."""
    frozen: Any = None
    """Weights that are not trained, set before the first step. No checkpoint holds them."""

    @abc.abstractmethod
    def init(self, params: Any = None) -> TrainState:
        """Return the state before the first step, created on its devices.

        Args:
          params: Parameters to begin with, placed as those of `abstract_state`. They are donated
            (deleted), so that no device holds them twice. None: random ones.
        """

    @abc.abstractmethod
    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state. Nothing is allocated."""

    @abc.abstractmethod
    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        """Return the global batch of which this host has `rows`, on the devices."""

    @abc.abstractmethod
    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the state after one update, and its metrics. Donates (deletes) `state`."""

    @abc.abstractmethod
    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        """Return the loss sums of a batch, by name, without dropout."""

    def abstract_params(self) -> Any:
        """Return shapes, dtypes and shardings of all parameters of the model."""
        return place_params(self.mesh, self.model, self.model.logical_axes())

    def abstract_frozen(self) -> Any:
        """Return shapes, dtypes and shardings of the frozen weights; None without LoRA."""
        return None if self.lora is None else self.lora.freeze(self.abstract_params())

    def model_params(self, params: Any) -> Any:
        """Return parameters that the model can be applied to, from those of a state."""
        return params if self.lora is None else self.lora.combine(params, self.frozen)

    def merged_params(self, params: Any) -> Any:
        """Return parameters as the model's `init` does, without low-rank updates."""
        if self.lora is None:
            return params
        return jax.jit(merge_weights)(self.model_params(params))

"""Engine: the training step compiled for a set of devices, and placement of its arrays.

The loop, the tasks and the evaluator call the `Engine` interface. `JitEngine` (`jit_engine.py`) is
the one for any mesh; `PmapEngine` (`pmap_engine.py`) has one replica of the model on each device.

Calls return before their programs have run: while the devices compute one step, the host reads the
next batch and dispatches the next step. Callers need not wait for results, since an engine limits
how many of its programs are in flight (`jit_engine.DispatchLimit`).
"""

import abc
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.debug_checks import train_step_class
from train.errors import UsageError
from train.experiment import Experiment
from train.optim.optimizer_registry import make_step_optimizer
from train.parallel.mesh import make_mesh
from train.state import TrainState
from train.step import Batch, Metrics, TrainStep
from train.tasks.task_registry import make_task
from transformer.hardware import Hardware
from transformer.lora import LoRALayout
from transformer.models.model import Model

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
    def auto_choices(self) -> dict[str, str]:
        """Return what each `auto` setting became on this hardware, with the reason."""

    @abc.abstractmethod
    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        """Return the loss sums of a batch, by name, without dropout."""


def make_engine(experiment: Experiment, hardware: Hardware) -> Engine:
    """Return the engine of an experiment over the first `hardware.count` devices.

    Raises:
      UsageError: the mesh or the model cannot be built.
    """
    mesh = make_mesh(experiment.mesh, jax.devices()[: hardware.count])
    try:
        # Imported here, because they import this file.
        if experiment.compile == "pmap":
            from train.pmap_engine import PmapEngine

            return PmapEngine(experiment, mesh, hardware)
        from train.jit_engine import JitEngine

        return JitEngine(experiment, mesh, hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_train_step(
    experiment: Experiment, model: Model, logical_axes: Any, axis_name: str | None = None
) -> TrainStep:
    """Return the training step of an experiment.

    Args:
      experiment: The settings.
      model: The model that the loss calls.
      logical_axes: Tree of `LogicalAxes` with the structure of the parameters.
      axis_name: The mapped axis to sum gradients over, if the step is compiled by `pmap`.
    """
    return train_step_class(experiment)(
        loss_fn=make_task(experiment).make_loss_fn(model),
        optimizer=make_step_optimizer(
            experiment.optimizer, logical_axes, experiment.mesh.optimizer_placement
        ),
        schedule=experiment.schedule.make(steps=experiment.steps, width=experiment.model.d_model),
        max_grad_norm=experiment.optimizer.max_grad_norm,
        grad_accum_steps=experiment.grad_accum_steps,
        loss_scale=experiment.loss_scale,
        axis_name=axis_name,
        ema_decay=experiment.ema.decay,
        recovery=experiment.recovery,
    )

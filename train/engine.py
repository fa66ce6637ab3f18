"""Engine: the training step compiled for a set of devices, and placement of its arrays.

The loop, the tasks and the evaluator call the `Engine` interface. `JitEngine` is the one for any
mesh; `train/pmap_engine.py` has another, with one replica of the model on each device.

Calls return before their programs have run: while the devices compute one step, the host reads the
next batch and dispatches the next step. Callers need not wait for results, since an engine limits
how many of its programs are in flight (`DispatchLimit`).
"""

import abc
import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.config.resolve import resolve_auto
from train.debug_checks import train_step_class
from train.errors import UsageError
from train.experiment import Experiment
from train.lora.layout import abstract_frozen, bind_frozen, make_lora_layout
from train.optim.registry import make_step_optimizer
from train.parallel.context_parallel import check_context_parallelism
from train.parallel.mesh import make_mesh
from train.parallel.model_sharding import (
    check_optimizer_placement,
    init_on_devices,
    leaf_shardings,
    make_sharding_constraint,
    place_state,
)
from train.parallel.sharding import replicated_sharding, shard_batch
from train.state import TrainState, init_state
from train.step import Batch, Metrics, TrainStep
from train.tasks.registry import make_task
from transformer.hardware import Hardware
from transformer.lora import LoRALayout
from transformer.models.base import Model

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
      with one thread for each device (or core, if there are more). A program over several devices
      needs a thread for each of them at the same time, since its collectives block a thread until
      all devices have arrived. A device accepts 32 programs. Dispatching one more blocks a thread
      of that same pool for each device until a program ends; the next program then lacks threads
      and never ends. The process hangs, or XLA aborts it after 40 seconds ("Termination timeout for
      all reduce").
    - Memory. Programs in flight keep their inputs on the device: without a bound, an evaluation
      would hold all batches of its split.

    Copies between host and devices use the pool too, but wait for nothing. A few at a time, as
    `train/data/batches.py` prefetches them, only delay a program. An endless stream would starve
    it.
    """

    def __init__(self, max_in_flight: int):
        self._max_in_flight = max_in_flight
        self._in_flight: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Register a dispatched program, and wait until at most `max_in_flight` are unfinished.

        Args:
          outputs: Arrays of the program that no later program takes as donated inputs. Any will do:
            all outputs of a program become ready together.
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
    def init(self) -> TrainState:
        """Return the state before the first step, created on its devices."""

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
        if experiment.compile == "pmap":
            # Imported here, because it imports this file.
            from train.pmap_engine import PmapEngine

            return PmapEngine(experiment, mesh, hardware)
        return JitEngine(experiment, mesh, hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


class JitEngine(Engine):
    """Training step compiled by `jit`, with a NamedSharding for every array."""

    def __init__(self, experiment: Experiment, mesh: Mesh, hardware: Hardware):
        # First of all: what these checks refuse would otherwise fail deep inside a trace.
        check_context_parallelism(experiment, mesh, hardware)
        check_optimizer_placement(experiment.mesh, hardware)
        self.experiment, self.mesh = experiment, mesh
        self.model = make_task(experiment).make_model(hardware, make_sharding_constraint(mesh))
        # All that is compiled in (model, optimizer, schedule, thresholds) is part of the step
        # and never changes, so one program serves the whole run.
        axes = self.model.logical_axes()
        self.lora = make_lora_layout(experiment.lora, axes)
        axes = axes if self.lora is None else self.lora.trainable_axes()
        self.train_step = make_train_step(experiment, self.model, axes)
        self.dispatch_limit = DispatchLimit(max_programs_in_flight(hardware, mesh))
        self._init = functools.partial(
            init_state, experiment, self.model, self.train_step.optimizer, self.lora
        )
        self._abstract_state = place_state(experiment, mesh, self._init, axes)
        # The state is donated: XLA writes the new parameters and moments into the buffers of the
        # old ones, and memory never holds both. Input shardings are those of the arguments.
        # Output shardings are given, not inferred: a state that the compiler laid out otherwise
        # would make the second step compile again, and could not reuse the donated buffers.
        self._step = jax.jit(
            named_train_step(self.train_step, self.lora),
            donate_argnums=0,
            out_shardings=(leaf_shardings(self._abstract_state), replicated_sharding(mesh)),
        )
        # Parameters are not donated to an evaluation: the next step needs them.
        self._evaluate = jax.jit(named_evaluation(self.train_step))

    def init(self) -> TrainState:
        return init_on_devices(self._init, self._abstract_state)

    def abstract_state(self) -> TrainState:
        return self._abstract_state

    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        # Returns before the copy has ended: it overlaps with the step that is being computed.
        return shard_batch(self.mesh, rows)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Dispatched, not run. Reading a metric here would make the devices wait for the host.
        state, metrics = self._step(state, batch, self.frozen)
        # Metrics are what the limit waits for: the next step donates the state, and a donated
        # array cannot be waited for.
        self.dispatch_limit.add(metrics)
        return state, metrics

    def lower_step(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Return the step's program before compilation. Arguments may be abstract."""
        return self._step.lower(state, batch, abstract_frozen(self))

    def auto_choices(self) -> dict[str, str]:
        return resolve_auto(self.experiment, self.model.hardware, self.mesh.shape["context"])

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        losses = self._evaluate(params, batch)
        self.dispatch_limit.add(losses)
        return losses


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


def named_train_step(step: TrainStep, lora: LoRALayout | None = None) -> Callable[..., Any]:
    """Return the step as a function. Profiles and compiler logs show its name, `train_step`."""
    # `TrainStep` is a dataclass, and its instances have no `__name__`.

    def train_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        return (step if lora is None else bind_frozen(step, lora, frozen))(state, batch)

    return train_step


def named_evaluation(step: TrainStep) -> Callable[[Any, Batch], dict[str, Any]]:
    """Return the loss without dropout as a function, `evaluate` in profiles."""

    def evaluate(params: Any, batch: Batch) -> dict[str, Any]:
        return step.loss_fn(params, batch, None)

    return evaluate

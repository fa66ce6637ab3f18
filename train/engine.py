"""What a compiled training step is to those who call it: the loop, the tasks, the judge.

An engine limits how many of its programs are in flight (`train/runtime/dispatch_limit.py`), so its callers may
call `step` and `evaluate` without waiting for their results.

The training step compiled for the devices at hand, by `jit` over a mesh or by `pmap`.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from train.config.resolve import resolve_auto
from train.errors import UsageError
from train.experiment import Experiment
from train.optim.loss_scale import LossScale
from train.optim.registry import make_step_optimizer
from train.optim.schedules import make_schedule
from train.parallel.batches import check_batch_divides, check_context_parallelism, shard_batch
from train.parallel.mesh import make_mesh
from train.parallel.sharding import (
    check_optimizer_placement,
    host_memory_shardings,
    make_sharding_constraint,
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.recovery.detector import AnomalyDetector
from train.runtime.dispatch_limit import DispatchLimit, max_programs_in_flight
from train.state import TrainState
from train.step import Batch, TrainStep
from train.tasks.registry import make_task
from transformer.context import unconstrained
from transformer.hardware import Hardware
from transformer.models.base import Model

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


def make_engine(experiment: Experiment, hardware: Hardware) -> Engine:
    """Return the engine that the experiment asks for, over the devices that `hardware` counts.

    Raises UsageError for a mesh, or a model, that cannot be made.
    """
    mesh = make_mesh(experiment.mesh, jax.devices()[: hardware.count])
    kind = PmapEngine if experiment.compile == "pmap" else JitEngine
    try:
        return kind(experiment, mesh, hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_batch_sharding(experiment: Experiment, mesh: Mesh) -> None:
    """Raises UsageError if batches to train on cannot be cut for the devices of a mesh."""
    check_batch_divides(mesh, *experiment.row_multiple, experiment.grad_accum_steps)


class JitEngine(Engine):
    """`jit` with a NamedSharding for every array."""

    def __init__(self, experiment: Experiment, mesh: Mesh, hardware: Hardware):
        self.experiment, self.mesh = experiment, mesh
        check_context_parallelism(experiment, mesh, hardware)
        self.model = make_task(experiment).make_model(hardware, make_sharding_constraint(mesh))
        self.axes = self.model.logical_axes()
        self.train_step = make_train_step(experiment, self.model, self.axes)
        check_optimizer_placement(experiment.mesh, hardware)
        self.dispatch_limit = DispatchLimit(max_programs_in_flight(hardware, mesh))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        step, loss = self.train_step, self.train_step.loss_fn

        # Profiles and compiler logs show the names of the functions that are compiled.
        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return step(state, batch)

        def evaluate(params: Any, batch: Batch) -> dict[str, Any]:
            return loss(params, batch, None)

        self._step = jax.jit(
            train_step, donate_argnums=0, out_shardings=(shardings, replicated_sharding(mesh))
        )
        self._evaluate = jax.jit(evaluate)

    def init(self) -> TrainState:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        # Whoever reads a number of a state that did not fit would wait for ever (jax 0.12 on CPUs).
        return jax.block_until_ready(jax.jit(self._init, out_shardings=shardings)())

    @functools.cached_property
    def _init(self) -> Callable[[], TrainState]:
        return functools.partial(init_state, self.experiment, self.model, self.train_step.optimizer)

    def abstract_state(self) -> TrainState:
        shapes = jax.eval_shape(self._init)
        params = parameter_shardings(self.mesh, self.axes, shapes.params)
        whole = replicated_sharding(self.mesh)
        optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, whole)
        if self.experiment.mesh.optimizer_placement == "host":
            optimizer = host_memory_shardings(optimizer)
        rest = jax.tree.map(lambda _: whole, shapes)
        ema = None if shapes.ema is None else params
        shardings = rest.replace(params=params, optimizer=optimizer, ema=ema)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        count = len(next(iter(rows.values()))) * jax.process_count()
        return shard_batch(self.mesh, rows, count)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = self._dispatch_step(state, batch)
        self.dispatch_limit.add(metrics)  # not the state, which the next step is given to overwrite
        return state, metrics

    def _dispatch_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self._step(state, batch)

    def lower_step(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The step's program before it is compiled; shapes will do for arguments."""
        return self._step.lower(state, batch)

    def auto_choices(self) -> dict[str, str]:
        return resolve_auto(self.experiment, self.model.hardware, self.mesh.shape["context"])

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        sums = self._evaluate(params, batch)
        self.dispatch_limit.add(sums)
        return sums


class PmapEngine(JitEngine):
    """`pmap`: replicated data parallelism, the batch cut along a mapped axis."""

    def __init__(self, experiment: Experiment, mesh: Mesh, hardware: Hardware):
        super().__init__(experiment, mesh, hardware)
        single = make_task(experiment).make_model(hardware, unconstrained)
        mapped = make_train_step(experiment, single, self.axes, axis_name="devices")

        def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return mapped(state, batch)

        self._mapped = jax.pmap(
            train_step, "devices", in_axes=(None, 0), out_axes=None, donate_argnums=0
        )

    def _dispatch_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        count = self.mesh.size
        cut = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        return self._mapped(state, cut)


def make_train_step(
    experiment: Experiment, model: Model, axes: Any, axis_name: str | None = None
) -> TrainStep:
    """The step of an experiment; `axis_name` if it is to be mapped over devices."""
    return TrainStep(
        loss_fn=make_task(experiment).make_loss_fn(model),
        optimizer=make_step_optimizer(
            experiment.optimizer, axes, experiment.mesh.optimizer_placement
        ),
        schedule=make_schedule(
            experiment.schedule, steps=experiment.steps, width=experiment.model.d_model
        ),
        max_grad_norm=experiment.optimizer.max_grad_norm,
        grad_accum_steps=experiment.grad_accum_steps,
        loss_scale=experiment.loss_scale,
        axis_name=axis_name,
        ema_decay=experiment.ema.decay,
        recovery=experiment.recovery,
    )


def init_state(
    experiment: Experiment, model: Model, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state at step 0, from the seed alone."""
    weights, dropout = jax.random.split(jax.random.key(experiment.seed))
    params = model.init_params(weights)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    scaled = experiment.model.precision.needs_loss_scale
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=params,
        optimizer=optimizer.init(wide),
        key=dropout,
        loss_scale=LossScale.init(experiment.loss_scale) if scaled else None,
        ema=wide if experiment.ema.decay else None,
        anomaly_detector=AnomalyDetector.create(experiment.recovery),
    )

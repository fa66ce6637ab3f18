"""Training step compiled by `jit` over any mesh, and a limit of programs in flight."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.config.resolve import resolve_auto
from train.engine import Engine, make_train_step, max_programs_in_flight
from train.experiment import Experiment
from train.lora.layout import abstract_frozen, bind_frozen, make_lora_layout
from train.parallel.context_parallel import check_context_parallelism, zigzag_reorder
from train.parallel.sharding import (
    check_optimizer_placement,
    init_on_devices,
    leaf_shardings,
    logical_to_sharding,
    make_sharding_constraint,
    num_shards,
    place_state,
)
from train.state import TrainState, init_state
from train.step import Batch, Metrics, TrainStep
from train.tasks.task_registry import make_task
from transformer.hardware import Hardware
from transformer.lora import LoRALayout


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
        loss_fn, optimizer = self.train_step.loss_fn, self.train_step.optimizer
        self._init = functools.partial(init_state, experiment, self.model, optimizer, self.lora)
        # By rank: metrics [] are replicated, rows are split over the batch axes of the mesh
        # (`examples` [B]), and the tokens of a row over its context axis ([B, T, ...]).
        self._shardings = [logical_to_sharding(mesh, ("batch", "length")[:n]) for n in range(3)]
        self._zigzag_shards = num_shards(mesh, "length") if experiment.model.causal else 1
        self._abstract_state = place_state(experiment, mesh, self._init, axes)
        # The state is donated: XLA writes the new parameters and moments into the buffers of the
        # old ones, and memory never holds both. Input shardings are those of the arguments.
        # Output shardings are given, not inferred: a state that the compiler laid out otherwise
        # would make the second step compile again, and could not reuse the donated buffers.
        self._step = jax.jit(
            named_train_step(self.train_step, self.lora),
            donate_argnums=0,
            out_shardings=(leaf_shardings(self._abstract_state), self._shardings[0]),
        )

        def evaluate(params: Any, batch: Batch) -> dict[str, Any]:  # its name in profiles
            return loss_fn(params, batch, None)

        # Parameters are not donated to an evaluation: the next step needs them.
        self._evaluate = jax.jit(evaluate)

    def init(self, params: Any = None) -> TrainState:
        return init_on_devices(self._init, self._abstract_state, params)

    def abstract_state(self) -> TrainState:
        return self._abstract_state

    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        if self._zigzag_shards > 1:
            rows = zigzag_reorder(rows, self._zigzag_shards)
        return {name: self._place_rows(array) for name, array in rows.items()}

    def _place_rows(self, array: np.ndarray) -> jax.Array:
        sharding = self._shardings[min(array.ndim, 2)]
        # The global shape is given, not inferred: if the mesh did not split rows over hosts, JAX
        # would take one host's rows for the whole batch without an error.
        shape = (len(array) * jax.process_count(), *array.shape[1:])
        # Returns before the copy has ended: it overlaps with the step that is being computed.
        return jax.make_array_from_process_local_data(sharding, array, shape)

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


def named_train_step(step: TrainStep, lora: LoRALayout | None = None) -> Callable[..., Any]:
    """Return the step as a function: profiles and compiler logs show its name, `train_step`.

    `TrainStep` is a dataclass, and its instances have no `__name__`.
    """

    def train_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        return (step if lora is None else bind_frozen(step, lora, frozen))(state, batch)

    return train_step

"""Training step compiled by `jit` over any mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from train.engines.engine import (
    DispatchLimit,
    Engine,
    MakeLossFn,
    MakeModel,
    TrainingConfig,
    make_train_step,
    max_programs_in_flight,
)
from train.engines.lora import make_lora_layout
from train.parallel.context_parallel import zigzag_reorder
from train.parallel.sharding import (
    check_optimizer_placement,
    host_memory_shardings,
    init_on_devices,
    leaf_shardings,
    logical_to_sharding,
    make_sharding_constraint,
    num_shards,
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.state import TrainState, init_state
from train.step import Batch, Metrics, TrainStep
from transformer.hardware import Hardware
from transformer.lora import LoRALayout


class JitEngine(Engine):
    """Training step compiled by `jit`, with a NamedSharding for every array."""

    def __init__(
        self,
        config: TrainingConfig,
        mesh: Mesh,
        hardware: Hardware,
        make_model: MakeModel,
        make_loss_fn: MakeLossFn,
    ):
        check_optimizer_placement(config.mesh, hardware)
        self.mesh = mesh
        self.model = make_model(hardware, make_sharding_constraint(mesh))
        # All that is compiled in (model, optimizer, schedule, thresholds) is part of the step
        # and never changes, so one program serves the whole run.
        axes = self.model.logical_axes()
        self.lora = make_lora_layout(config.lora, axes)
        axes = axes if self.lora is None else self.lora.trainable_axes()
        loss_fn = make_loss_fn(self.model)
        self.train_step = make_train_step(config, loss_fn, axes, self.model.config.d_model)
        self.dispatch_limit = DispatchLimit(max_programs_in_flight(hardware, mesh))
        self._init = functools.partial(
            init_state,
            config.seed,
            self.model,
            self.train_step.optimizer,
            loss_scale=config.loss_scale,
            ema=config.ema,
            recovery=config.recovery,
            lora=self.lora,
        )
        # By rank: metrics [] are replicated, rows are split over the batch axes of the mesh
        # (`examples` [B]), and the tokens of a row over its context axis ([B, T, ...]).
        self._shardings = [logical_to_sharding(mesh, ("batch", "length")[:n]) for n in range(3)]
        self._zigzag_shards = num_shards(mesh, "length") if self.model.config.causal else 1
        self._abstract_state = place_state(mesh, self._init, axes, config.mesh.optimizer_placement)
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
        return self._step.lower(state, batch, self.abstract_frozen())

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        losses = self._evaluate(params, batch)
        self.dispatch_limit.add(losses)
        return losses


def place_state(
    mesh: Mesh,
    init: Callable[[], TrainState],
    logical_axes: Any,
    optimizer_placement: Literal["device", "host"],
) -> TrainState:
    """Return shapes and dtypes of the state that `init` makes, with the sharding of each array."""
    # Shapes without values: the placement of a model that no device could hold is computed, and
    # `plan` places models for machines that are not attached.
    shapes = jax.eval_shape(init)
    replicated = replicated_sharding(mesh)
    params = parameter_shardings(mesh, logical_axes, shapes.params)
    optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, replicated)
    if optimizer_placement == "host":
        optimizer = host_memory_shardings(optimizer)
    ema = None if shapes.ema is None else params
    # Counters, random key, loss scale and the detector's history: a few kilobytes, on all devices.
    everywhere = jax.tree.map(lambda _: replicated, shapes)
    shardings = everywhere.replace(params=params, optimizer=optimizer, ema=ema)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def named_train_step(step: TrainStep, lora: LoRALayout | None = None) -> Callable[..., Any]:
    """Return the step as a function: profiles and compiler logs show its name, `train_step`.

    `TrainStep` is a dataclass, and its instances have no `__name__`.
    """

    def train_step(state: TrainState, batch: Batch, frozen: Any) -> tuple[TrainState, Metrics]:
        return (step if lora is None else bind_frozen(step, lora, frozen))(state, batch)

    return train_step


def bind_frozen(step: TrainStep, layout: LoRALayout, frozen: Any) -> TrainStep:
    """Return the step of a LoRA run with these frozen weights.

    The parameters of its state are the trainable tree. Gradients, optimizer, EMA and anomaly
    detection see nothing else, so that none of them has arrays of the size of the model.
    """

    def loss_fn(trainable: Any, batch: Batch, dropout_rngs: jax.Array | None) -> Any:
        return step.loss_fn(layout.combine(trainable, frozen), batch, dropout_rngs)

    return dataclasses.replace(step, loss_fn=loss_fn)

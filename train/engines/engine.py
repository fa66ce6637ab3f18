"""The engine of a run: its model, its compiled training step, and the placement of its arrays.

The step is compiled by `jit` over any mesh, or by `pmap` with a replica of the model on each device
(`train/engines/compiled_step.py`). States, batches and evaluations are the same for both, so that
a checkpoint of one is a checkpoint of the other.

Calls return before their programs have run: while the devices compute one step, the host reads the
next batch and dispatches the next step. Callers need not wait for results, since an engine limits
how many of its programs are in flight (`DispatchLimit`).
"""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from train.engines.compiled_step import (
    CompiledFunction,
    CompiledStep,
    EngineConfig,
    MakeLossFn,
    MakeModel,
    check_pmap,
    make_pmap_step,
    make_train_step,
    named_train_step,
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
    place_params,
    place_shapes,
    replicated_sharding,
)
from train.state import TrainState, init_state
from train.step import Batch, Metrics
from transformer.hardware import Hardware
from transformer.layers.low_rank import merge_weights
from transformer.lora import LoRALayout
from transformer.quantization import (
    axes_of_quantized,
    has_quantized,
    quantize_weights,
    shapes_as_stored,
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


class Engine:
    """A compiled training step and what belongs to it.

    States are those of a checkpoint: one logical copy of every array, however it is placed.
    """

    lora: LoRALayout | None = None
    """Layout of the trainable weights of a LoRA run; None: all weights are trained."""
    frozen: Any = None
    """Weights that are not trained, set before the first step. No checkpoint holds them."""

    def __init__(
        self,
        config: EngineConfig,
        mesh: Mesh,
        hardware: Hardware,
        make_model: MakeModel,
        make_loss_fn: MakeLossFn,
    ):
        """Build the model and the step; nothing is compiled.

        Raises:
          UserError: The devices cannot hold the optimizer's state, or run the step, as requested.
        """
        check_optimizer_placement(config.mesh, hardware)
        if config.compile == "pmap":
            check_pmap()
        self.mesh = mesh
        self.model = make_model(hardware, make_sharding_constraint(mesh))
        # All that is compiled in (model, optimizer, schedule, thresholds) is part of the step
        # and never changes, so one program serves the whole run.
        axes = self.model.logical_axes()
        self.lora = make_lora_layout(config.lora, axes)
        self.quantization = config.lora.quantize
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
        if config.compile == "pmap":
            self._step: CompiledStep = make_pmap_step(
                config, mesh, hardware, make_model, make_loss_fn, self.lora
            )
        else:
            # The state is donated: XLA writes the new parameters and moments into the buffers of
            # the old ones, and memory never holds both. Input shardings are those of the arguments.
            # Output shardings are given, not inferred: a state that the compiler laid out otherwise
            # would make the second step compile again, and could not reuse the donated buffers.
            self._step = CompiledFunction(
                jax.jit(
                    named_train_step(self.train_step, self.lora),
                    donate_argnums=0,
                    out_shardings=(leaf_shardings(self._abstract_state), self._shardings[0]),
                )
            )

        def evaluate(params: Any, batch: Batch) -> dict[str, Any]:  # its name in profiles
            return loss_fn(params, batch, None)

        # Parameters are not donated to an evaluation: the next step needs them.
        self._evaluate = CompiledFunction(jax.jit(evaluate))

    def init(self, params: Any = None) -> TrainState:
        """Return the state before the first step, created on its devices.

        Args:
          params: Parameters to begin with, placed as those of `abstract_state`. They are donated
            (deleted), so that no device holds them twice. None: random ones.
        """
        return init_on_devices(self._init, self._abstract_state, params)

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state. Nothing is allocated."""
        return self._abstract_state

    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        """Return the global batch of which this host has `rows`, on the devices."""
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
        """Return the state after one update, and its metrics. Donates (deletes) `state`."""
        # Dispatched, not run. Reading a metric here would make the devices wait for the host.
        state, metrics = self._step(state, batch, self.frozen)
        # Metrics are what the limit waits for: the next step donates the state, and a donated
        # array cannot be waited for.
        self.dispatch_limit.add(metrics)
        return state, metrics

    def compile_step_ahead(self, batch: Batch) -> None:
        """Start to compile the step of `jit` for batches like this one, before there is a state."""
        step: Any = self._step
        step.compile_ahead(self._abstract_state, batch, self.abstract_frozen())

    def lower_step(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Return the program of `jit` before compilation. Arguments may be abstract."""
        step: Any = self._step
        return step.jitted.lower(state, batch, self.abstract_frozen())

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        """Return the loss sums of a batch, by name, without dropout."""
        losses = self._evaluate(params, batch)
        self.dispatch_limit.add(losses)
        return losses

    def abstract_params(self) -> Any:
        """Return shapes, dtypes and shardings of all parameters of the model."""
        return place_params(self.mesh, self.model, self.model.logical_axes())

    def abstract_base(self) -> Any:
        """Return shapes, dtypes and shardings of the weights that a LoRA run starts from."""
        assert self.lora is not None
        return self.place_quantized(
            quantize_weights(
                self.abstract_params(),
                self.model.logical_axes(),
                self.quantization,
                keep=self.lora.trained,
            )
        )

    def abstract_frozen(self) -> Any:
        """Return shapes, dtypes and shardings of the frozen weights; None without LoRA."""
        return None if self.lora is None else self.lora.freeze(self.abstract_base())

    def shapes_as_stored(self, stored: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
        """Return shapes, dtypes and shardings of all parameters, as a checkpoint has them.

        Args:
          stored: Shapes of the checkpoint's arrays, by tree path.
        """
        axes = self.model.logical_axes()
        return self.place_quantized(shapes_as_stored(self.abstract_params(), axes, stored))

    def place_quantized(self, shapes: Any) -> Any:
        """Return shapes of all parameters, some of which may be quantized, with shardings."""
        axes = axes_of_quantized(self.model.logical_axes(), shapes)
        return place_shapes(self.mesh, axes, shapes)

    def model_params(self, params: Any) -> Any:
        """Return parameters that the model can be applied to, from those of a state."""
        return params if self.lora is None else self.lora.combine(params, self.frozen)

    def merged_params(self, params: Any) -> Any:
        """Return parameters without low-rank updates: as the model's `init` does.

        A quantized base keeps the updates beside it: merged, it would take the memory of floats,
        or be rounded once more.
        """
        if self.lora is None:
            return params
        combined = self.model_params(params)
        return combined if has_quantized(self.frozen) else jax.jit(merge_weights)(combined)


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

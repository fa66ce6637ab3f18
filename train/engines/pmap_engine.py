"""Engine whose training step is compiled by `pmap`: one replica of the model on each device."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.engines.engine import (
    Engine,
    MakeLossFn,
    MakeModel,
    TrainingConfig,
    make_train_step,
)
from train.engines.jit_engine import JitEngine, named_train_step
from train.errors import UserError
from train.parallel.sharding import replicated_sharding
from train.state import TrainState
from train.step import Batch, Metrics
from transformer.hardware import Hardware
from transformer.model_context import unconstrained

AXIS_NAME = "devices"
"""Mapped axis over which the step sums losses and gradients."""

MIN_JAX_ON_SEVERAL_HOSTS = (0, 10, 0)
"""Oldest version that was tried. 0.7's `pmap` takes the rows of the own host alone."""


class PmapEngine(Engine):
    """Training step compiled by `pmap`: replicated parameters, the batch split over the devices.

    States, batches and evaluation are those of a `JitEngine` over the same mesh, so that a
    checkpoint of one engine is a checkpoint of the other. Only `step` differs.
    """

    def __init__(
        self,
        config: TrainingConfig,
        mesh: Mesh,
        hardware: Hardware,
        make_model: MakeModel,
        make_loss_fn: MakeLossFn,
    ):
        """Build the step; nothing is compiled.

        Raises:
          UserError: There are several processes, whose global arrays `pmap` of an old JAX refuses.
        """
        if jax.process_count() > 1 and jax.__version_info__ < MIN_JAX_ON_SEVERAL_HOSTS:
            needed = ".".join(map(str, MIN_JAX_ON_SEVERAL_HOSTS))
            raise UserError(
                f"compile pmap: on several hosts needs jax {needed} or later, and this is "
                f"{jax.__version__}; give --compile jit"
            )
        # Its own step is never called, and so never compiled.
        self._jit_engine = JitEngine(config, mesh, hardware, make_model, make_loss_fn)
        self.model, self.mesh = self._jit_engine.model, mesh
        self.train_step = self._jit_engine.train_step
        # Inside `pmap` a program sees one device and its rows alone.
        one_device = dataclasses.replace(hardware, count=1)
        replica = make_model(one_device, unconstrained)
        self.lora = self._jit_engine.lora
        axes = replica.logical_axes() if self.lora is None else self.lora.trainable_axes()
        train_step = make_train_step(
            config, make_loss_fn(replica), axes, replica.config.d_model, AXIS_NAME
        )
        # `out_axes=None` returns one logical copy. All replicas have the same state after the
        # step, since `TrainStep` sums gradients over the mapped axis.
        self._step = jax.pmap(
            named_train_step(train_step, self.lora),
            AXIS_NAME,
            in_axes=(None, 0, None),
            out_axes=None,
            donate_argnums=0,
        )

    def init(self, params: Any = None) -> TrainState:
        return self._jit_engine.init(params)

    def abstract_state(self) -> TrainState:
        return self._jit_engine.abstract_state()

    def put_batch(self, rows: dict[str, np.ndarray]) -> Batch:
        return self._jit_engine.put_batch(rows)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # [B, ...] -> [devices, B / devices, ...]: `put_batch` has placed each device's rows there
        # already, so the reshape moves none between devices.
        num_devices = self.mesh.size
        split = jax.tree.map(lambda x: x.reshape(num_devices, -1, *x.shape[1:]), batch)
        state, metrics = self._step(state, split, self.frozen)
        if jax.process_count() > 1:
            state, metrics = jax.tree.map(self._over_all_hosts, (state, metrics))
        self._jit_engine.dispatch_limit.add(metrics)
        return state, metrics

    def _over_all_hosts(self, replicas: jax.Array) -> jax.Array:
        """Return an array that `pmap` left on this host's devices as one over the whole mesh.

        Checkpoints and evaluations take global arrays alone. Nothing is copied.
        """
        shards = [shard.data for shard in replicas.addressable_shards]
        sharding = replicated_sharding(self.mesh)
        return jax.make_array_from_single_device_arrays(replicas.shape, sharding, shards)

    def evaluate(self, params: Any, batch: Batch) -> dict[str, Any]:
        return self._jit_engine.evaluate(params, batch)

"""Memory of the training state and of residuals by tracing, a part of `footprint`.

The bytes of the state on one chip are exact, for any mesh. Residuals (arrays saved for the backward
pass) come from tracing the real loss and are classified by shape: arrays whose last axis is the
model width are replicated over the `tensor` axis, the others (heads, hidden units, scores) are
sharded by it.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from train.assembly import make_task, training_config
from train.engines.engine import make_train_step
from train.engines.lora import make_lora_layout
from train.estimate.batch_shapes import max_batch_shape, unsharded_batch_shapes
from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from train.parallel.sharding import (
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.state import TrainState, init_state
from transformer.attention.backends.choose import Backend
from transformer.hardware import Hardware
from transformer.model_context import unconstrained
from transformer.models.model import Model
from transformer.models.stack import RematPolicy
from transformer.parameter_counts import LayerMixer, abstract_parameters


def layer_backend(experiment: Experiment, hardware: Hardware, layer: LayerMixer) -> Backend | None:
    """Return the attention backend of a layer; None for other mixers."""
    length = max_batch_shape(experiment)[1]
    choice = layer.backend_choice(
        experiment.model, length, hardware=hardware, segments=experiment.has_segments
    )
    return None if choice is None else choice.backend


class Residuals(NamedTuple):
    """Bytes saved for the backward pass."""

    replicated_per_row: int
    """Bytes per example that `tensor` does not shard."""
    sharded_per_row: int
    """Bytes per example that `tensor` shards."""

    def bytes_per_chip(self, rows: float, tensor: int) -> float:
        """Return the residuals of a chip for its rows of a microbatch."""
        return rows * (self.replicated_per_row + self.sharded_per_row / tensor)


def trace_residuals(experiment: Experiment, hardware: Hardware, remat: RematPolicy) -> Residuals:
    """Trace the residuals of the experiment's model under another rematerialization policy.

    Two traces, with one and two rows, separate what grows with the batch from what does not.
    """
    model = dataclasses.replace(experiment.model, remat=remat)
    experiment = dataclasses.replace(experiment, model=model)
    # Rows are those of one device, and the model is not laid out on a mesh. `blockwise` in place of
    # a kernel saves one array of the size of its outputs more.
    hardware = dataclasses.replace(hardware, is_attached=False, count=1)
    one_row, two_rows = (_residual_arrays(experiment, hardware, rows) for rows in (1, 2))
    replicated = sharded = 0
    for one, two in zip(one_row, two_rows, strict=True):
        growth = _array_bytes(two) - _array_bytes(one)
        if one.shape and one.shape[-1] == model.d_model:
            replicated += growth
        else:
            sharded += growth
    return Residuals(replicated, sharded)


def _residual_arrays(experiment: Experiment, hardware: Hardware, rows: int) -> list[Any]:
    """Return the arrays that the backward pass of `rows` examples reads, without the weights."""
    task = make_task(experiment)
    model = task.make_model(hardware, unconstrained)
    loss = task.make_loss_fn(model)
    batch = unsharded_batch_shapes(experiment, rows)

    def pull(params: Any, batch: Any) -> Any:
        keys = jax.vmap(jax.random.key)(batch["examples"])
        return jax.vjp(lambda params: loss(params, batch, keys)["loss"].total, params)[1]

    program = jax.make_jaxpr(pull)(abstract_parameters(model).shapes, batch).jaxpr
    input_ids = {id(variable) for variable in program.invars}
    residuals = {id(variable): variable.aval for variable in program.outvars}
    return [aval for name, aval in residuals.items() if name not in input_ids]


def _array_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)


class StateBytes(NamedTuple):
    """Bytes of one chip."""

    weights: int
    optimizer: int
    other: int
    """The exponential moving average of the weights."""
    gradients: int
    """Gradients in float32."""


class StateShapes(NamedTuple):
    """Training state as shapes, with the logical axes of its parameters."""

    shapes: TrainState
    axes: Any
    model: Model
    predicted_fraction: float
    """Fraction of tokens that have a prediction target."""
    frozen: Any = None
    """Shapes of the weights that a LoRA run does not train."""
    frozen_axes: Any = None

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "StateShapes":
        """Return the state's shapes by abstract evaluation of its initialization."""
        # The state is the same on any hardware and with any rematerialization. Trace the plain
        # form: kernels trace only on their own hardware, and `offload` needs a host memory space.
        plain = dataclasses.replace(experiment.model, remat="none")
        task = make_task(dataclasses.replace(experiment, model=plain))
        model = task.make_model(Hardware(), unconstrained)
        axes, frozen, frozen_axes = model.logical_axes(), None, None
        lora = make_lora_layout(experiment.lora, axes)
        if lora is not None:
            frozen = lora.freeze(jax.eval_shape(model.init_params, jax.random.key(0)))
            axes, frozen_axes = lora.trainable_axes(), lora.frozen_axes()
        config = training_config(experiment)
        step = make_train_step(config, task.make_loss_fn(model), axes, model.config.d_model)
        init = functools.partial(
            init_state,
            config.seed,
            model,
            step.optimizer,
            loss_scale=config.loss_scale,
            ema=config.ema,
            recovery=config.recovery,
            lora=lora,
        )
        fraction = (
            model.predicted_fraction if task.target_fraction is None else task.target_fraction
        )
        return cls(jax.eval_shape(init), axes, model, fraction, frozen, frozen_axes)

    def bytes_per_chip(self, mesh: MeshConfig) -> StateBytes:
        """Return one chip's part. Raises UsageError for a mesh that does not divide the model."""
        abstract: Any = abstract_mesh(mesh)
        shapes = self.shapes
        params = parameter_shardings(abstract, self.axes, shapes.params)
        replicated = replicated_sharding(abstract)
        optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, replicated)
        weights = _shard_bytes(shapes.params, params)
        if self.frozen is not None:
            shardings = parameter_shardings(abstract, self.frozen_axes, self.frozen)
            weights += _shard_bytes(self.frozen, shardings)
        moments = _shard_bytes(shapes.optimizer, optimizer)
        ema = 0 if shapes.ema is None else _shard_bytes(shapes.ema, params)
        gradients = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), shapes.params
        )
        return StateBytes(weights, moments, ema, _shard_bytes(gradients, params))


def abstract_mesh(mesh: MeshConfig) -> AbstractMesh:
    """Return the mesh without devices."""
    return AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)


def _shard_bytes(shapes: Any, shardings: Any) -> int:
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)

"""Exact bytes of the training state on one chip, for any mesh, without devices."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from train.engine import make_train_step
from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from train.parallel.sharding import replicated_sharding
from train.parallel.state_sharding import optimizer_state_shardings, parameter_shardings
from train.state import TrainState, init_state
from train.tasks.registry import make_task
from transformer.context import unconstrained
from transformer.hardware import Hardware
from transformer.models.base import Model


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

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "StateShapes":
        """Return the state's shapes by abstract evaluation of its initialization."""
        # The state is the same on any hardware and with any rematerialization. Trace the plain
        # form: kernels trace only on their own hardware, and `offload` needs a host memory space.
        plain = dataclasses.replace(experiment.model, remat="none")
        task = make_task(dataclasses.replace(experiment, model=plain))
        model = task.make_model(Hardware(), unconstrained)
        axes = model.logical_axes()
        step = make_train_step(experiment, model, axes)
        init = functools.partial(init_state, experiment, model, step.optimizer)
        fraction = (
            model.predicted_fraction if task.target_fraction is None else task.target_fraction
        )
        return cls(jax.eval_shape(init), axes, model, fraction)

    def bytes_per_chip(self, mesh: MeshConfig) -> StateBytes:
        """Return one chip's part. Raises UsageError for a mesh that does not divide the model."""
        abstract: Any = abstract_mesh(mesh)
        shapes = self.shapes
        params = parameter_shardings(abstract, self.axes, shapes.params)
        replicated = replicated_sharding(abstract)
        optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, replicated)
        weights = _bytes(shapes.params, params)
        moments = _bytes(shapes.optimizer, optimizer)
        ema = 0 if shapes.ema is None else _bytes(shapes.ema, params)
        gradients = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), shapes.params
        )
        return StateBytes(weights, moments, ema, _bytes(gradients, params))


def abstract_mesh(mesh: MeshConfig) -> AbstractMesh:
    """Return the mesh without devices."""
    return AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)


def _bytes(shapes: Any, shardings: Any) -> int:
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)

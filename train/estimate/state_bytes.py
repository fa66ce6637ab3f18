"""What a chip has of the state of a run, exactly, for any mesh, without a device.

What chips send each other in a step, by mesh axis: an estimate from the layout alone.

Weights that `fsdp` has cut are gathered for each microbatch, once forward and once backward, and
their gradients are summed and scattered once (Rajbhandari et al. 2020, section 7). Along `tensor`
each layer sums its activations twice forward and twice backward (Shoeybi et al. 2019, section 3),
and once more where the layer is computed again. Along `context` keys and values go round a ring,
with their gradients on the way back (Liu et al. 2023). Along `expert` tokens travel to their
experts and back, in both directions of differentiation (Lepikhin et al. 2021).
"""

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
from train.parallel.sharding import (
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.state import TrainState, init_state
from train.tasks.registry import make_task
from transformer.context import unconstrained
from transformer.hardware import Hardware
from transformer.models.base import Model


class StateBytes(NamedTuple):
    """Of one chip."""

    weights: int
    optimizer: int
    other: int
    gradients: int
    """In float32."""


class StateShapes(NamedTuple):
    """A run's state without arrays, and how its axes are called."""

    shapes: TrainState
    axes: Any
    model: Model
    predicted_fraction: float
    """Share of the tokens of which a word is told."""

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "StateShapes":
        # The same for any hardware and whatever is kept of the forward pass; but some hardware has
        # kernels that only it can trace, and not all can wait in a host's memory.
        plain = dataclasses.replace(experiment.model, remat="none")
        task = make_task(dataclasses.replace(experiment, model=plain))
        model = task.make_model(Hardware(), unconstrained)
        axes = model.logical_axes()
        step = make_train_step(experiment, model, axes)
        start = functools.partial(init_state, experiment, model, step.optimizer)
        told = model.predicted_fraction if task.target_fraction is None else task.target_fraction
        return cls(jax.eval_shape(start), axes, model, told)

    def bytes_per_chip(self, mesh: MeshConfig) -> StateBytes:
        """A chip's part. Raises UsageError for a mesh that does not divide the model."""
        abstract: Any = abstract_mesh(mesh)
        shapes = self.shapes
        params = parameter_shardings(abstract, self.axes, shapes.params)
        whole = replicated_sharding(abstract)
        optimizer = optimizer_state_shardings(shapes.optimizer, shapes.params, params, whole)
        weights = _bytes(shapes.params, params)
        moments = _bytes(shapes.optimizer, optimizer)
        average = 0 if shapes.ema is None else _bytes(shapes.ema, params)
        wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), shapes.params)
        return StateBytes(weights, moments, average, _bytes(wide, params))


def abstract_mesh(mesh: MeshConfig) -> AbstractMesh:
    """The mesh without devices."""
    return AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)


def _bytes(shapes: Any, shardings: Any) -> int:
    leaves = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)

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

from train.engine import init_state, make_train_step
from train.estimate.quantities import Quantities
from train.estimate.search import Candidate
from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from train.parallel.sharding import (
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from train.state import TrainState
from train.tasks.registry import make_task
from transformer.attention.config import AttentionConfig
from transformer.context import unconstrained
from transformer.hardware import Hardware
from transformer.layers.config import MoEConfig
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


GATHERS_PER_MICROBATCH = 2.25
"""Times that weights are gathered in a microbatch: forward, backward, and some of them twice, as
the compiler's programs have it."""


MATRICES_PER_LAYER = 6
"""Of a layer: each is gathered and scattered by itself."""


def bytes_sent(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """Bytes that each chip sends in a step, by mesh axis; axes of one chip are left out."""
    mesh = candidate.mesh
    counts = {
        "data": _data(quantities, candidate),
        "fsdp": _fsdp(quantities, candidate),
        "expert": _expert(quantities, candidate),
        "context": _context(quantities, candidate),
        "tensor": _tensor(quantities, candidate),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(mesh, axis) > 1}


def collective_counts(quantities: Quantities, candidate: Candidate) -> dict[str, float]:
    """How many collectives a chip takes part in, one after the other, by mesh axis."""
    again = 1 if candidate.remat != "none" else 0
    layers = quantities.num_layers * candidate.grad_accum_steps
    counts = {
        "data": 1.0,  # gradients travel together
        "fsdp": layers * MATRICES_PER_LAYER * (GATHERS_PER_MICROBATCH + 1),
        "expert": layers * (4.0 + 2 * again),
        "context": layers * (3.0 + again) * (candidate.mesh.context - 1),
        "tensor": layers * (4.0 + again),
    }
    return {axis: counts[axis] for axis in MESH_AXES if getattr(candidate.mesh, axis) > 1}


def tokens_per_chip(quantities: Quantities, candidate: Candidate) -> float:
    """Tokens of a chip in one step, of all its microbatches."""
    mesh = candidate.mesh
    parts = mesh.data * mesh.fsdp * mesh.expert * mesh.context
    return (
        quantities.batch_size
        * quantities.sequence_length
        * quantities.sequences_per_example
        / parts
    )


def _weights(quantities: Quantities, candidate: Candidate) -> float:
    """Bytes of the weights that a chip works with, gathered, in the dtype of products."""
    cut = candidate.mesh.tensor * candidate.mesh.expert
    return (
        (quantities.layer_parameters + quantities.other_parameters)
        / cut
        * quantities.compute_itemsize
    )


def _around(parts: int) -> float:
    """Share of an array that a ring of so many sends."""
    return (parts - 1) / parts


def _fsdp(quantities: Quantities, candidate: Candidate) -> float:
    whole = _weights(quantities, candidate) * _around(candidate.mesh.fsdp)
    return candidate.grad_accum_steps * whole * (GATHERS_PER_MICROBATCH + 1)


def _data(quantities: Quantities, candidate: Candidate) -> float:
    gradients = _weights(quantities, candidate) / candidate.mesh.fsdp
    return candidate.grad_accum_steps * 2 * gradients * _around(candidate.mesh.data)


def _tensor(quantities: Quantities, candidate: Candidate) -> float:
    times = 5 if candidate.remat != "none" else 4
    activations = tokens_per_chip(quantities, candidate) * _width(quantities)
    a_side = quantities.num_layers / quantities.sequences_per_example
    return 2 * times * a_side * activations * _around(candidate.mesh.tensor)


def _context(quantities: Quantities, candidate: Candidate) -> float:
    """Keys and values forward, and again with their gradients backward."""
    heads = 0
    for block in quantities.experiment.model.layer_pattern:
        if isinstance(block.mixer, AttentionConfig):
            width = block.mixer.resolved_head_dim(quantities.experiment.model.d_model)
            heads += 2 * (block.mixer.num_kv_heads or block.mixer.num_heads) * width
    shared = heads / len(quantities.experiment.model.layer_pattern) / candidate.mesh.tensor
    a_hop = tokens_per_chip(quantities, candidate) * shared * quantities.compute_itemsize
    again = 1 if candidate.remat != "none" else 0
    return (3 + again) * quantities.num_layers * a_hop * (candidate.mesh.context - 1)


def _expert(quantities: Quantities, candidate: Candidate) -> float:
    chosen = [
        block.feed_forward.num_experts_per_token
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    share = sum(chosen) / len(quantities.experiment.model.layer_pattern)
    again = 1 if candidate.remat != "none" else 0
    activations = tokens_per_chip(quantities, candidate) * _width(quantities)
    return (
        (4 + 2 * again)
        * quantities.num_layers
        * share
        * activations
        * _around(candidate.mesh.expert)
    )


def _width(quantities: Quantities) -> int:
    """Bytes of one token between layers."""
    return quantities.experiment.model.d_model * quantities.compute_itemsize

"""What differentiation keeps of a forward pass, by tracing the real loss.

Arrays are counted by their shapes: those whose last axis is the model's width lie whole on every
part of the `tensor` axis, the others (heads, hidden units, scores) are cut by it.

How much memory a step takes on a chip: a model fitted to what compilers reserve.

The state and the batch are exact. What is reserved beside them is made of what differentiation
keeps (traced), gradients, and what a layer and the loss work with, each times a coefficient. The
coefficients are fitted to steps compiled for TPUs and GPUs (`bench/drills/plan.py`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from train.estimate.attention_backends import replace_kernels
from train.estimate.batch_shapes import unsharded_batch_shapes
from train.experiment import Experiment
from train.tasks.registry import make_task
from transformer.config import RematPolicy
from transformer.context import unconstrained
from transformer.hardware import Hardware
from transformer.parameter_counts import abstract_parameters


class Residuals(NamedTuple):
    """Bytes."""

    replicated_per_row: int
    """Of one row of a batch, not cut by `tensor`."""
    sharded_per_row: int
    """Of one row, cut by it."""
    batch_independent: int
    """That do not grow with the batch: weights in another dtype, gradients that the loss takes."""

    def bytes_per_chip(self, rows: float, tensor: int) -> float:
        """On one chip, for its rows of a microbatch."""
        return rows * (self.replicated_per_row + self.sharded_per_row / tensor)


def trace_residuals(experiment: Experiment, hardware: Hardware, remat: RematPolicy) -> Residuals:
    """Of the experiment's model with another rematerialisation."""
    model = dataclasses.replace(experiment.model, remat=remat)
    experiment = replace_kernels(dataclasses.replace(experiment, model=model), hardware)
    once, twice = (_residuals(experiment, hardware, rows) for rows in (1, 2))
    whole = cut = weights = 0
    for one, two in zip(once, twice, strict=True):
        growth = _bytes(two) - _bytes(one)
        weights += _bytes(one) - growth
        if one.shape and one.shape[-1] == model.d_model:
            whole += growth
        else:
            cut += growth
    return Residuals(whole, cut, weights)


def _residuals(experiment: Experiment, hardware: Hardware, rows: int) -> list[Any]:
    """Arrays that the backward pass of so many rows is given, the weights themselves left out."""
    task = make_task(experiment)
    model = task.make_model(hardware, unconstrained)
    loss = task.make_loss_fn(model)
    batch = unsharded_batch_shapes(experiment, rows)

    def pull(params: Any, batch: Any) -> Any:
        keys = jax.vmap(jax.random.key)(batch["examples"])
        return jax.vjp(lambda params: loss(params, batch, keys)["loss"].total, params)[1]

    program = jax.make_jaxpr(pull)(abstract_parameters(model).shapes, batch).jaxpr
    given = {id(variable) for variable in program.invars}
    found = {id(variable): variable.aval for variable in program.outvars}
    return [aval for name, aval in found.items() if name not in given]


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)

"""Residuals of a forward pass (arrays saved for the backward pass), from tracing the real loss.

Arrays are classified by shape: those whose last axis is the model width are replicated over the
`tensor` axis, the others (heads, hidden units, scores) are sharded by it.
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
    """Bytes saved for the backward pass."""

    replicated_per_row: int
    """Bytes per example that `tensor` does not shard."""
    sharded_per_row: int
    """Bytes per example that `tensor` shards."""
    batch_independent: int
    """Bytes that do not grow with the batch: weights in another dtype, gradients taken by the loss.
    """

    def bytes_per_chip(self, rows: float, tensor: int) -> float:
        """Return the residuals of a chip for its rows of a microbatch."""
        return rows * (self.replicated_per_row + self.sharded_per_row / tensor)


def trace_residuals(experiment: Experiment, hardware: Hardware, remat: RematPolicy) -> Residuals:
    """Trace the residuals of the experiment's model under another rematerialization policy.

    Two traces, with one and two rows, separate what grows with the batch from what does not.
    """
    model = dataclasses.replace(experiment.model, remat=remat)
    experiment = replace_kernels(dataclasses.replace(experiment, model=model), hardware)
    one_row, two_rows = (_residual_arrays(experiment, hardware, rows) for rows in (1, 2))
    replicated = sharded = batch_independent = 0
    for one, two in zip(one_row, two_rows, strict=True):
        growth = _bytes(two) - _bytes(one)
        batch_independent += _bytes(one) - growth
        if one.shape and one.shape[-1] == model.d_model:
            replicated += growth
        else:
            sharded += growth
    return Residuals(replicated, sharded, batch_independent)


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
    given = {id(variable) for variable in program.invars}
    found = {id(variable): variable.aval for variable in program.outvars}
    return [aval for name, aval in found.items() if name not in given]


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize)

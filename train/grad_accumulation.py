"""Gradient accumulation: the gradients of a batch as a sum over microbatches.

Shapes: B examples of a batch, A microbatches.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from train.state import TrainState
from transformer.losses import Loss

if TYPE_CHECKING:
    from train.step import Batch


def accumulate_gradients(
    compute_gradients: "Callable[[TrainState, Batch], tuple[Any, dict[str, Loss]]]",
    state: TrainState,
    batch: "Batch",
    num_microbatches: int,  # A
) -> tuple[Any, dict[str, Loss]]:
    """Return the mean of the gradients of A microbatches, and the sums of their losses.

    Only one microbatch is in memory with its activations at a time.
    """
    # Microbatch j takes examples j, j + A, j + 2A, ...: with consecutive examples instead, a
    # microbatch would lie on few of the devices that share the batch.
    count = num_microbatches
    microbatches = jax.tree.map(
        lambda x: x.reshape(len(x) // count, count, *x.shape[1:]).swapaxes(0, 1), batch
    )  # [A, B / A, ...]
    # A scan needs the sum's shapes before its first iteration. `eval_shape` traces one
    # microbatch without computing it.
    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = jax.eval_shape(compute_gradients, state, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: Any, microbatch: "Batch") -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, compute_gradients(state, microbatch)), None

    (grads, losses), _ = jax.lax.scan(add, zeros, microbatches)
    # Each microbatch divided by its own size, which is 1 / A of the batch's.
    return jax.tree.map(lambda g: g / count, grads), losses

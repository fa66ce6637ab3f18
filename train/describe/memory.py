"""What training keeps in memory, item by item, over all devices together."""

import dataclasses
from typing import TYPE_CHECKING

from train.describe.activations import Activations, estimate_activations

if TYPE_CHECKING:
    from train.optimizers import OptimizerConfig
    from transformer.model import Model

TEXTBOOK_WEIGHTS = {"float32": 4, "16 and 32 bits": 6}
TEXTBOOK_GRADIENTS = 4
TEXTBOOK_OPTIMIZERS = {"AdamW": 8, "8-bit AdamW": 2, "SGD with momentum": 4}
"""Bytes a parameter, as courses count them: without activations and the scales of 8-bit blocks."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes, over all devices together."""

    weights: int
    """As they are stored, the padding of the vocabulary included."""
    compute_copy: int
    """Weights cast to the dtype of products, where that is another."""
    gradients: int
    """In float32, whatever the weights are; twice when microbatches are added up."""
    optimizer: int
    """Moments, exactly as the optimizer makes them."""
    activations: Activations
    """An estimate."""
    logits: int
    """Of one chunk of the loss, with their gradient, in float32."""
    textbook_logits: int
    """2 B T V elements in float32: what logits of the whole batch would take."""

    @property
    def total(self) -> int:
        state = self.weights + self.compute_copy + self.gradients + self.optimizer
        return state + self.activations.bytes + self.logits


def training_memory(
    model: "Model",
    optimizer: "OptimizerConfig",
    *,
    batch_size: int,
    sequence_length: int,
    accumulate: int = 1,
    segments: bool = False,
) -> Memory:
    """What a training step holds; `batch_size` counts the windows of all microbatches."""
    import jax.numpy as jnp

    from transformer.losses import chunk_count
    from transformer.sizes import abstract, count_parameters

    config = model.config
    count = count_parameters(model).allocated
    item = jnp.dtype(config.precision.compute).itemsize
    rows = batch_size // accumulate
    chunks = chunk_count(rows, sequence_length, config.vocab_rows, model.hardware)
    chunk = rows * -(-sequence_length // chunks)
    return Memory(
        weights=sum(leaf.bytes for leaf in abstract(model).leaves()),
        compute_copy=0 if config.precision.compute == config.precision.parameters else count * item,
        gradients=4 * count * (1 if accumulate == 1 else 2),
        optimizer=optimizer_bytes(model, optimizer),
        activations=estimate_activations(model, rows, sequence_length, segments=segments),
        logits=2 * 4 * chunk * config.vocab_rows,
        textbook_logits=2 * 4 * rows * sequence_length * config.vocab_size,
    )


def optimizer_bytes(model: "Model", optimizer: "OptimizerConfig") -> int:
    """Size of the optimizer's state for float32 gradients, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optimizers import make_optimizer
    from transformer.sizes import abstract

    shapes, axes = abstract(model)
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
    state = jax.eval_shape(make_optimizer(optimizer, axes).init, wide)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

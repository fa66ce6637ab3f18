"""What training keeps in memory, item by item, over all devices together."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from train.describe.activations import Activations, estimate_activations

if TYPE_CHECKING:
    from train.optimizers import OptimizerConfig
    from transformer.model import Model


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
    average: int = 0
    """The moving average of the weights, in float32, if one is kept."""

    @property
    def total(self) -> int:
        return self.state + self.compute_copy + self.gradients + self.working

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.weights + self.optimizer + self.average

    @property
    def working(self) -> int:
        """What a batch takes."""
        return self.activations.bytes + self.logits


def training_memory(
    model: "Model",
    optimizer: "OptimizerConfig",
    *,
    batch_size: int,
    sequence_length: int,
    accumulate: int = 1,
    segments: bool = False,
    average: bool = False,
    told: float | None = None,
) -> Memory:
    """What a training step holds; `batch_size` counts the windows of all microbatches.

    `told` is the share of the tokens of which a word is told; None: the model's own.
    """
    import jax.numpy as jnp

    from transformer.losses import chunk_count
    from transformer.sizes import abstract, count_parameters

    config = model.config
    count = count_parameters(model).allocated
    item = jnp.dtype(config.precision.compute).itemsize
    rows = batch_size // accumulate
    words = round(sequence_length * (model.told if told is None else told))
    chunks = chunk_count(rows, words, config.vocab_rows, model.hardware) if words else 1
    chunk = rows * -(-words // chunks)
    return Memory(
        weights=sum(leaf.bytes for leaf in abstract(model).leaves()),
        compute_copy=0 if config.precision.compute == config.precision.parameters else count * item,
        gradients=4 * count * (1 if accumulate == 1 else 2),
        optimizer=optimizer_bytes(model, optimizer),
        activations=estimate_activations(model, rows, sequence_length, segments=segments),
        logits=2 * 4 * chunk * config.vocab_rows,
        textbook_logits=2 * 4 * rows * words * config.vocab_size,
        average=4 * count if average else 0,
    )


def optimizer_bytes(model: "Model", optimizer: "OptimizerConfig") -> int:
    """Size of the optimizer's state."""
    import jax

    leaves = jax.tree.leaves(optimizer_state(model, optimizer))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.lru_cache(maxsize=16)
def optimizer_state(model: "Model", optimizer: "OptimizerConfig") -> Any:
    """Shapes of the optimizer's state for float32 gradients, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optimizers import make_optimizer
    from transformer.sizes import abstract

    shapes, axes = abstract(model)
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
    return jax.eval_shape(make_optimizer(optimizer, axes).init, wide)

"""What training keeps in memory, item by item, over all devices together."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from train.describe.activations import ActivationMemory, estimate_activations

if TYPE_CHECKING:
    from train.optimizers import OptimizerConfig
    from transformer.model import Model


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes, over all devices together."""

    weights: int
    """As they are stored, the padding of the vocabulary included."""
    compute_copy: int
    """Weights cast to the dtype of products, where that is another."""
    gradients: int
    """In float32, whatever the weights are; twice when microbatches are added up."""
    optimizer: int
    """Moments, exactly as the optimizer makes them."""
    activations: ActivationMemory
    """An estimate."""
    logits: int
    """Of one chunk of the loss, with their gradient, in float32."""
    textbook_logits: int
    """2 B T V elements in float32: what logits of the whole batch would take."""
    ema: int = 0
    """The moving average of the weights, in float32, if one is kept."""

    @property
    def total(self) -> int:
        return self.state + self.compute_copy + self.gradients + self.working_set

    @property
    def state(self) -> int:
        """What is there between steps."""
        return self.weights + self.optimizer + self.ema

    @property
    def working_set(self) -> int:
        """What a batch takes."""
        return self.activations.bytes + self.logits


def estimate_training_memory(
    model: "Model",
    optimizer: "OptimizerConfig",
    *,
    batch_size: int,
    sequence_length: int,
    grad_accum_steps: int = 1,
    segments: bool = False,
    ema: bool = False,
    predicted_fraction: float | None = None,
) -> TrainingMemory:
    """What a training step holds; `batch_size` counts the windows of all microbatches.

    `predicted_fraction` is the share of the tokens of which a word is told; None: the model's own.
    """
    import jax.numpy as jnp

    from transformer.losses import choose_num_chunks
    from transformer.sizes import abstract_parameters, count_parameters

    config = model.config
    count = count_parameters(model).allocated
    item = jnp.dtype(config.precision.compute).itemsize
    rows = batch_size // grad_accum_steps
    words = round(
        sequence_length
        * (model.predicted_fraction if predicted_fraction is None else predicted_fraction)
    )
    chunks = (
        choose_num_chunks(rows, words, config.padded_vocab_size, model.hardware) if words else 1
    )
    chunk = rows * -(-words // chunks)
    return TrainingMemory(
        weights=sum(leaf.num_bytes for leaf in abstract_parameters(model).leaves()),
        compute_copy=0 if config.precision.compute == config.precision.parameters else count * item,
        gradients=4 * count * (1 if grad_accum_steps == 1 else 2),
        optimizer=optimizer_state_bytes(model, optimizer),
        activations=estimate_activations(model, rows, sequence_length, segments=segments),
        logits=2 * 4 * chunk * config.padded_vocab_size,
        textbook_logits=2 * 4 * rows * words * config.vocab_size,
        ema=4 * count if ema else 0,
    )


def optimizer_state_bytes(model: "Model", optimizer: "OptimizerConfig") -> int:
    """Size of the optimizer's state."""
    import jax

    leaves = jax.tree.leaves(optimizer_state_shapes(model, optimizer))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@functools.lru_cache(maxsize=16)
def optimizer_state_shapes(model: "Model", optimizer: "OptimizerConfig") -> Any:
    """Shapes of the optimizer's state for float32 gradients, by tracing how it starts."""
    import jax
    import jax.numpy as jnp

    from train.optimizers import make_optimizer
    from transformer.sizes import abstract_parameters

    shapes, axes = abstract_parameters(model)
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), shapes)
    return jax.eval_shape(make_optimizer(optimizer, axes).init, wide)

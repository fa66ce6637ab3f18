"""What the losses of tasks are made of."""

from typing import Any

import jax
import jax.numpy as jnp

from train.step import AUXILIARY, Batch
from transformer.losses import ChunkedCrossEntropy, Loss, chunk_count
from transformer.mixers import NO_OUTPUTS, Outputs
from transformer.model import Model, output_matrix

LOSSES: Outputs = frozenset({"losses"})


def wanted(dropout_rngs: jax.Array | None) -> Outputs:
    """What a model is asked for beside its hidden states: in training, its own losses."""
    return NO_OUTPUTS if dropout_rngs is None else LOSSES


def word_loss(
    model: Model,
    params: Any,
    hidden: jax.Array,  # [B, T, D]
    batch: Batch,  # `targets` and `weights` [B, T]
    *,
    bias: jax.Array | None = None,  # [V padded]
    smoothing: float = 0.0,
    accuracy: bool = False,
) -> dict[str, Loss]:
    """Cross entropy over the vocabulary, in chunks that fit the hardware: `loss`.

    With `accuracy`, the share of words that are told right too.
    """
    config, hardware = model.config, model.hardware
    batch_size, length, _ = hidden.shape
    parts = model.constrain.parts("length")
    parts = 1 if length % parts else parts
    chunks = chunk_count(batch_size, length, config.vocab_rows, hardware, parts)
    cross_entropy = ChunkedCrossEntropy(
        vocab_size=config.vocab_size,
        chunks=chunks,
        unroll=hardware.platform == "cpu" and chunks <= 8,
        dtype=config.precision.loss,
        smoothing=smoothing,
        spread=parts > 1,
    )
    inputs = hidden, output_matrix(params, config), batch["targets"], batch["weights"], bias
    found = {"loss": cross_entropy(*inputs)}
    return {**found, "accuracy": cross_entropy.accuracy(*inputs)} if accuracy else found


def class_loss(
    model: Model,
    logits: jax.Array,  # [..., C]
    batch: Batch,  # `targets` and `weights` [...]
) -> dict[str, Loss]:
    """Cross entropy over a few classes, and the share of those that are told right."""
    targets, weights = batch["targets"], batch["weights"]
    chances = jax.nn.log_softmax(logits.astype(model.config.precision.loss), axis=-1)
    losses = -jnp.take_along_axis(chances, targets[..., None], axis=-1)[..., 0]
    right = jnp.argmax(chances, axis=-1) == targets
    weight = jnp.sum(weights)
    return {
        "loss": Loss(jnp.sum(losses * weights), weight),
        "accuracy": Loss(jnp.sum(right * weights), weight),
    }


def auxiliary(
    aux: Any,  # of a model
    weight: jax.Array,  # of the batch's loss
) -> dict[str, Loss]:
    """The model's own losses by name, summed over layers, to be weighted as the batch's loss is."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        name = str(getattr(path[-1], "key", ""))
        if name.startswith(AUXILIARY):
            found[name] = found.get(name, jnp.float32(0)) + jnp.sum(leaf.astype(jnp.float32))
    return {name: Loss(value * weight, weight) for name, value in sorted(found.items())}

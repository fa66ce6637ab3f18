"""What the losses of tasks are made of."""

from typing import Any

import jax
import jax.numpy as jnp

from train.step import AUX_LOSS_PREFIX, Batch
from transformer.attention.base import NO_OUTPUTS, Outputs
from transformer.losses import ChunkedCrossEntropy, Loss, choose_num_chunks
from transformer.models.base import Model, get_output_matrix

LOSS_OUTPUTS: Outputs = frozenset({"losses"})


def requested_outputs(dropout_rngs: jax.Array | None) -> Outputs:
    """What a model is asked for beside its hidden states: in training, its own losses."""
    return NO_OUTPUTS if dropout_rngs is None else LOSS_OUTPUTS


def token_loss(
    model: Model,
    params: Any,
    hidden: jax.Array,  # [B, T, D]
    batch: Batch,  # `targets` and `weights` [B, T]
    *,
    bias: jax.Array | None = None,  # [V padded]
    label_smoothing: float = 0.0,
    with_accuracy: bool = False,
) -> dict[str, Loss]:
    """Cross entropy over the vocabulary, in chunks that fit the hardware: `loss`.

    With `with_accuracy`, the share of words that are told right too.
    """
    config, hardware = model.config, model.hardware
    batch_size, length, _ = hidden.shape
    parts = model.constrain.num_shards("length")
    parts = 1 if length % parts else parts
    chunks = choose_num_chunks(batch_size, length, config.padded_vocab_size, hardware, parts)
    cross_entropy = ChunkedCrossEntropy(
        vocab_size=config.vocab_size,
        num_chunks=chunks,
        unroll=hardware.platform == "cpu" and chunks <= 8,
        dtype=config.precision.loss,
        label_smoothing=label_smoothing,
        context_sharded=parts > 1,
    )
    inputs = hidden, get_output_matrix(params, config), batch["targets"], batch["weights"], bias
    found = {"loss": cross_entropy(*inputs)}
    return {**found, "accuracy": cross_entropy.accuracy(*inputs)} if with_accuracy else found


def label_loss(
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


def auxiliary_losses(
    aux: Any,  # of a model
    weight: jax.Array,  # of the batch's loss
) -> dict[str, Loss]:
    """The model's own losses by name, summed over layers, to be weighted as the batch's loss is."""
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        name = str(getattr(path[-1], "key", ""))
        if name.startswith(AUX_LOSS_PREFIX):
            found[name] = found.get(name, jnp.float32(0)) + jnp.sum(leaf.astype(jnp.float32))
    return {name: Loss(value * weight, weight) for name, value in sorted(found.items())}

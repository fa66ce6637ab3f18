"""Losses of a model's outputs: over the vocabulary, over labels, and the model's own.

Every loss is a sum with its weight: add both over microbatches and devices, and divide once. Label
smoothing is in `chunked_cross_entropy`, a router's losses and its z-loss in `layers.moe_dispatch`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from transformer.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    TokenLogProbs,
    choose_num_chunks,
)
from transformer.models.embedding import get_output_matrix
from transformer.models.explicit_sharding import with_auto_axes
from transformer.models.model import Model
from transformer.taps import NO_OUTPUTS, Outputs
from transformer.validation import check_shapes

AUX_LOSS_PREFIX = "loss/"
"""First part of the names of a model's own losses, such as the load balancing of experts."""


class Loss(NamedTuple):
    """A loss as (sum, weight): the mean is taken once, over microbatches and devices."""

    total: jax.Array  # sum of the weighted losses, in nats
    weight: jax.Array  # sum of the weights


def weighted_loss(
    values: Float[Array, "*axes"] | Bool[Array, "*axes"],  # losses
    weights: Float[Array, "*axes"],  # of the same shape
) -> Loss:
    """Return the sum of weighted losses with the sum of their weights, in float32."""
    chex.assert_equal_shape([values, weights])
    weights = weights.astype(jnp.float32)
    return Loss(jnp.sum(values.astype(jnp.float32) * weights), jnp.sum(weights))


def requested_outputs(dropout_rngs: jax.Array | None) -> Outputs:
    """Return the extra outputs to request from a model: in training, its auxiliary losses."""
    return NO_OUTPUTS if dropout_rngs is None else frozenset({"losses"})


def token_loss(
    model: Model,
    params: Any,
    hidden: Float[Array, "B T D"],  # of `ModelOutput`
    batch: Mapping[str, jax.Array],  # `targets` and `weights` [B, T]
    *,
    bias: Float[Array, "Vp"] | None = None,  # of a masked head; None: `output_bias`, if any
    label_smoothing: float = 0.0,
    with_accuracy: bool = False,
) -> dict[str, Loss]:
    """Return `loss`, the cross entropy over the vocabulary, and with `with_accuracy` `accuracy`.

    Logits [B, T, V] are the largest array of a small model: they are computed in chunks of T,
    so that one chunk fits the hardware.
    """
    check_shapes(hidden=(hidden, "B T D", float))
    config = model.config
    cross_entropy = _cross_entropy(model, hidden, label_smoothing)
    bias = params.get("output_bias") if bias is None else bias
    matrix, targets, weights = get_output_matrix(params, config), batch["targets"], batch["weights"]
    weight = jnp.sum(weights.astype(config.precision.loss))
    losses = {"loss": Loss(cross_entropy(hidden, matrix, targets, weights, bias), weight)}
    if with_accuracy:
        correct = cross_entropy.accuracy(hidden, matrix, targets, weights, bias)
        losses["accuracy"] = Loss(correct, weight)
    return losses


def token_log_probs(
    model: Model,
    params: Any,
    hidden: Float[Array, "B T D"],  # of `ModelOutput`
    targets: Int[Array, "B T"],
    *,
    num_top: int = 1,  # K
) -> TokenLogProbs:
    """Return the log-probabilities of targets and of the K likeliest tokens, chunk by chunk."""
    check_shapes(hidden=(hidden, "B T D", float), targets=(targets, "B T", int))
    matrix, bias = get_output_matrix(params, model.config), params.get("output_bias")
    cross_entropy = _cross_entropy(model, hidden)
    return cross_entropy.log_probs(hidden, matrix, targets, bias, num_top=num_top)


def _cross_entropy(
    model: Model, hidden: Float[Array, "B T D"], label_smoothing: float = 0.0
) -> ChunkedCrossEntropy:
    """Return the cross entropy over a model's vocabulary, in chunks that fit its hardware."""
    config, hardware = model.config, model.hardware
    batch_size, length, d_model = hidden.shape
    # Each device chunks its own tokens if T is sharded; otherwise a chunk would cross devices.
    length_shards = model.constrain.num_shards("length")
    length_shards = 1 if length % length_shards else length_shards
    return ChunkedCrossEntropy(
        vocab_size=config.vocab_size,
        num_chunks=choose_num_chunks(
            batch_size, length, d_model, config.padded_vocab_size, hardware, length_shards
        ),
        dtype=config.precision.loss,
        label_smoothing=label_smoothing,
        soft_cap=config.logit_soft_cap,
        # Over a vocabulary that is sharded, XLA would gather the logits for it.
        one_pass=hardware.platform == "gpu" and model.constrain.num_shards("vocab") == 1,
        context_sharded=length_shards > 1,
    )


def next_token_loss(
    model: Model,
    params: Any,
    batch: Mapping[str, jax.Array],  # tokens, targets, weights, positions, segments [B, T]
    dropout_rngs: Key[Array, "B"] | None = None,  # None: evaluation
    *,
    has_segments: bool = True,  # False: each row is one text, and `segments` is not read
) -> dict[str, Loss]:
    """Return `loss` of a language model, and its own losses; tokens attend within their segment."""
    needed = ("tokens", "targets", "weights", *(("positions", "segments") if has_segments else ()))
    check_shapes(**{name: (batch[name], "B? T") for name in needed})
    # Under context parallelism a device's tokens are not contiguous. Else no mask needs positions.
    context_parallel = model.constrain.num_shards("length") > 1
    output = with_auto_axes(model.apply)(
        {"params": params},
        batch["tokens"],
        positions=batch["positions"] if has_segments or context_parallel else None,
        segments=batch["segments"] if has_segments else None,
        dropout_rngs=dropout_rngs,
        outputs=requested_outputs(dropout_rngs),
    )
    losses = token_loss(model, params, output.hidden, batch)
    return losses | auxiliary_losses(output.aux, losses["loss"].weight)


def label_loss(
    model: Model,
    logits: Float[Array, "... C"],
    batch: Mapping[str, jax.Array],  # `targets` and `weights` [...]
) -> dict[str, Loss]:
    """Return `loss`, the cross entropy over C labels, and `accuracy`."""
    targets, weights = batch["targets"], batch["weights"]
    check_shapes(
        targets=(targets, "...", int), weights=(weights, "..."), logits=(logits, "... C", float)
    )
    log_probs = jax.nn.log_softmax(logits.astype(model.config.precision.loss), axis=-1)
    labels_or_0 = jnp.where(weights != 0, targets, 0)  # 0 times NaN, beyond C, would be NaN
    losses = -jnp.take_along_axis(log_probs, labels_or_0[..., None], axis=-1)[..., 0]
    correct = jnp.argmax(log_probs, axis=-1) == targets
    return {"loss": weighted_loss(losses, weights), "accuracy": weighted_loss(correct, weights)}


def auxiliary_losses(
    aux: Any,  # auxiliary outputs of a model
    weight: jax.Array,  # weight of the batch's loss
) -> dict[str, Loss]:
    """Return the model's own losses (such as load balancing) by name, summed over layers.

    Each gets the weight of the batch's loss: then accumulation and sharding average both alike.
    """
    sums: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        # One dict for each place of the layer pattern: the last key of a path is the name.
        name = str(getattr(path[-1], "key", ""))
        if name.startswith(AUX_LOSS_PREFIX):
            sums[name] = sums.get(name, jnp.float32(0)) + jnp.sum(leaf.astype(jnp.float32))
    return {name: Loss(value * weight, weight) for name, value in sorted(sums.items())}

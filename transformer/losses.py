"""Cross-entropy over the vocabulary, fused with the output matrix and computed in chunks.

The logits [B, T, V] of a batch are never materialized. The gradient of a chunk's loss is known once
its logits are, so the forward pass computes it too and nothing is recomputed: the residuals are
d_hidden [B, T, D] and d_matrix [D, V], for any number of chunks.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.hardware import Hardware
from transformer.layers.embedding import mask_padded_logits
from transformer.shapes import check_shapes


class Loss(NamedTuple):
    """A loss as (sum, weight): the mean is taken once, over microbatches and devices."""

    total: jax.Array  # sum of the weighted losses, in nats
    weight: jax.Array  # sum of the weights


@dataclasses.dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Chunked cross-entropy (hashable settings). Chunks split T, so B stays sharded."""

    vocab_size: int  # V without padding
    num_chunks: int = 1
    """Number of chunks; see `choose_num_chunks`."""
    unroll: bool = False
    """Unroll the loop over chunks."""
    dtype: str = "float32"
    """Dtype of the log-sum-exp and of sums."""
    label_smoothing: float = 0.0
    """Probability mass of each target spread evenly over V tokens (Szegedy et al. 2016, section 7;
    Vaswani et al. 2017, section 5.4)."""
    context_sharded: bool = False
    """True if T is sharded: each device then has its share of every chunk."""

    def __call__(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
        bias: jax.Array | None = None,  # [V padded]
    ) -> Loss:
        """Return the sum over tokens of weight * -log softmax(hidden matrix + bias)[target].

        Targets of weight 0 are ignored and may be any number, such as -100.

        Raises:
          ValueError: If shapes disagree.
        """
        check_shapes(
            hidden=(hidden, "B T D"),
            matrix=(matrix, "D V"),
            targets=(targets, "B T"),
            weights=(weights, "B T"),
            bias=(bias, "V"),
        )
        output = _output(hidden, matrix, bias)
        weights = weights.astype(self.dtype)
        # An out-of-range index in `take_along_axis` gives NaN, and NaN * 0 is NaN.
        targets = jnp.where(weights != 0, targets, 0)
        return Loss(_total(self, hidden, output, targets, weights), jnp.sum(weights))

    def accuracy(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
        bias: jax.Array | None = None,  # [V padded]
    ) -> Loss:
        """Return the sum over tokens of weight * (1 if the target is the argmax); no gradient."""
        output, weights = _output(hidden, matrix, bias), weights.astype(self.dtype)

        def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            h, t, w = _rows(self, chunk)
            best = jnp.argmax(_logits(self, output, h), axis=-1)
            return total + jnp.sum((best == t) * w), None

        start, chunks = jnp.zeros((), self.dtype), _split(self, hidden, targets, weights)
        total, _ = jax.lax.scan(add, start, chunks, unroll=self.unroll or 1)
        return Loss(total, jnp.sum(weights))


class OutputProjection(NamedTuple):
    """Output matrix and bias, in the dtype of the hidden states."""

    matrix: jax.Array  # [D, V padded]
    bias: jax.Array | None  # [V padded]


def _output(hidden: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> OutputProjection:
    dtype = hidden.dtype
    return OutputProjection(matrix.astype(dtype), None if bias is None else bias.astype(dtype))


def choose_num_chunks(
    batch_size: int,  # B over all devices
    length: int,  # T
    padded_vocab_size: int,
    hardware: Hardware,
    context_shards: int = 1,  # shards of T
) -> int:
    """Return the number of chunks that keeps a chunk's float32 logits within a budget per device.

    With a sharded T, chunks divide each shard evenly.
    """
    budget = 64 * 2**20 if hardware.platform == "cpu" else 512 * 2**20
    per_device = -(-batch_size // hardware.count) * length * padded_vocab_size * 4
    least = max(1, min(length, math.ceil(per_device / budget)))
    if context_shards == 1:
        return least
    each = length // context_shards
    return next((count for count in range(least, each) if each % count == 0), each)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(
    settings: ChunkedCrossEntropy,
    hidden: jax.Array,
    output: OutputProjection,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + _chunk_loss(settings, output, *chunk), None

    start = jnp.zeros((), settings.dtype)
    chunks = _split(settings, hidden, targets, weights)
    return jax.lax.scan(add, start, chunks, unroll=settings.unroll or 1)[0]


def _forward(
    settings: ChunkedCrossEntropy,
    hidden: jax.Array,
    output: OutputProjection,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, OutputProjection]]:
    """Compute the loss and its gradients in `hidden` and `output` in one pass over the chunks."""

    def add(
        carry: tuple[jax.Array, OutputProjection], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, OutputProjection], jax.Array]:
        # The cotangent of the loss is a scalar: gradients are taken for 1 here and scaled in
        # `_backward`.
        total, d_output = carry
        h, t, w = chunk
        loss, vjp = jax.vjp(lambda h, o: _chunk_loss(settings, o, h, t, w), h, output)
        d_h, d_o = vjp(jnp.ones((), settings.dtype))
        d_output = jax.tree.map(lambda sum_, d: sum_ + d.astype(sum_.dtype), d_output, d_o)
        return (total + loss, d_output), d_h

    # The matrix gradient is a sum over chunks: accumulated in the dtype of the loss.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, settings.dtype), output)
    start, chunks = (
        (jnp.zeros((), settings.dtype), zeros),
        _split(settings, hidden, targets, weights),
    )
    (total, d_output), d_hidden = jax.lax.scan(add, start, chunks, unroll=settings.unroll or 1)
    b, t, d = hidden.shape
    d_hidden = jnp.moveaxis(d_hidden, 0, 2 if settings.context_sharded else 1).reshape(b, -1, d)[
        :, :t
    ]
    d_output = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_output, output)
    return total, (d_hidden, d_output)


def _backward(
    settings: ChunkedCrossEntropy, gradients: tuple[jax.Array, OutputProjection], d_total: jax.Array
) -> tuple[jax.Array, OutputProjection, None, None]:
    d_hidden, d_output = jax.tree.map(lambda d: d * d_total.astype(d.dtype), gradients)
    return d_hidden, d_output, None, None


_total.defvjp(_forward, _backward)


def _chunk_loss(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B, t, D]
    targets: jax.Array,  # [B, t]
    weights: jax.Array,  # [B, t]
) -> jax.Array:
    """Return the weighted sum of losses over one chunk."""
    hidden, targets, weights = _rows(settings, (hidden, targets, weights))
    logits = _logits(settings, output, hidden)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if settings.label_smoothing:
        mean = _mean(logits, settings.vocab_size)
        # Cross-entropy with the smoothed target: its logit is this weighted mean.
        target_logits = (
            1 - settings.label_smoothing
        ) * target_logits + settings.label_smoothing * mean
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(losses * weights)


def _mean(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [...]
    """Return the mean over V. Masked, not sliced: slicing a sharded axis would move rows."""
    in_vocab = jnp.arange(logits.shape[-1]) < vocab_size
    in_vocab = in_vocab.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.sum(jnp.where(in_vocab, logits, 0), axis=-1) / vocab_size


def _rows(settings: ChunkedCrossEntropy, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Reshape [B, t, ...] to [B t, ...], unless T is sharded: merging would gather an axis."""
    if settings.context_sharded:
        return chunk
    return tuple(array.reshape(-1, *array.shape[2:]) for array in chunk)


def _logits(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B t, D], or [B, t, D]
) -> jax.Array:  # [B t, V padded], or [B, t, V padded]
    logits = jnp.dot(hidden, output.matrix, preferred_element_type=jnp.dtype(settings.dtype))
    if output.bias is not None:
        bias = output.bias.astype(logits.dtype)
        logits = logits + bias.reshape((1,) * (logits.ndim - 1) + (-1,))
    return mask_padded_logits(logits, settings.vocab_size)


def _split(settings: ChunkedCrossEntropy, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Split [B, T, ...] into [chunks, B, t, ...]; padding of T has weight 0."""
    return tuple(
        _split_one(array, settings.num_chunks, settings.context_sharded) for array in arrays
    )


def _split_one(array: jax.Array, chunks: int, spread: bool) -> jax.Array:
    length = array.shape[1]
    if spread:  # strided, so that every shard contributes to each chunk
        return jnp.moveaxis(array.reshape(len(array), -1, chunks, *array.shape[2:]), 2, 0)
    size = -(-length // chunks)
    pads = [(0, 0)] * array.ndim
    pads[1] = (0, size * chunks - length)
    padded = jnp.pad(array, pads)
    return padded.reshape(len(array), chunks, size, *array.shape[2:]).swapaxes(0, 1)

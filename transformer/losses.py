"""Cross entropy over the vocabulary, in chunks, so that the logits of a whole batch never exist.

The gradient of a chunk's loss in its logits is known as soon as the logits are: it is taken in the
forward pass, and nothing is computed twice. Only [B, T, D] and [D, V] are kept for the backward
pass, whatever the number of chunks.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.hardware import Hardware
from transformer.models.base import mask_padded_logits


class Loss(NamedTuple):
    """A loss as a sum and what it is the sum of: a mean is taken once, over everything."""

    total: jax.Array  # sum of the weighted losses, in nats
    weight: jax.Array  # sum of the weights


@dataclasses.dataclass(frozen=True)
class ChunkedCrossEntropy:
    """How a batch is cut. Chunks go along T, so that a batch stays spread over its devices."""

    vocab_size: int  # V without padding
    num_chunks: int = 1
    unroll: bool = False
    dtype: str = "float32"
    """Of the log-sum-exp and of the sum."""
    label_smoothing: float = 0.0
    """Share of each target that is spread evenly over all V words (Szegedy et al. 2016, section 7;
    Vaswani et al. 2017, section 5.4)."""
    context_sharded: bool = False
    """Whether T is spread over devices: each then has its share of every chunk."""

    def __call__(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
        bias: jax.Array | None = None,  # [V padded]
    ) -> Loss:
        """Sum over tokens of weight * -log softmax(hidden matrix + bias)[target].

        A target of weight 0 is not read: it may be any number, such as -100.
        """
        output = _output(hidden, matrix, bias)
        weights = weights.astype(self.dtype)
        # Out of the table, `take_along_axis` gives NaN, and NaN * 0 is NaN.
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
        """Sum over tokens of weight * (1 if the target is the likeliest word); no gradient.

        A target of weight 0 counts nothing, whatever it is.
        """
        output, weights = _output(hidden, matrix, bias), weights.astype(self.dtype)

        def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            h, t, w = _rows(self, chunk)
            best = jnp.argmax(_logits(self, output, h), axis=-1)
            return total + jnp.sum((best == t) * w), None

        start, chunks = jnp.zeros((), self.dtype), _cut(self, hidden, targets, weights)
        total, _ = jax.lax.scan(add, start, chunks, unroll=self.unroll or 1)
        return Loss(total, jnp.sum(weights))


class OutputProjection(NamedTuple):
    """What makes logits of hidden states, in their dtype."""

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
    context_shards: int = 1,  # that T is spread over
) -> int:
    """How many chunks keep one chunk's float32 logits on a device within a budget.

    Of tokens that are spread, each part is cut evenly.
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
    form: ChunkedCrossEntropy,
    hidden: jax.Array,
    output: OutputProjection,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + _chunk_loss(form, output, *chunk), None

    start = jnp.zeros((), form.dtype)
    chunks = _cut(form, hidden, targets, weights)
    return jax.lax.scan(add, start, chunks, unroll=form.unroll or 1)[0]


def _forward(
    form: ChunkedCrossEntropy,
    hidden: jax.Array,
    output: OutputProjection,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, OutputProjection]]:
    """The loss, and its gradients in `hidden` and `output`, in one pass over the chunks."""

    def add(
        carry: tuple[jax.Array, OutputProjection], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, OutputProjection], jax.Array]:
        total, d_output = carry
        h, t, w = chunk
        loss, pull = jax.vjp(lambda h, o: _chunk_loss(form, o, h, t, w), h, output)
        d_h, d_o = pull(jnp.ones((), form.dtype))
        d_output = jax.tree.map(lambda sum_, d: sum_ + d.astype(sum_.dtype), d_output, d_o)
        return (total + loss, d_output), d_h

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, form.dtype), output)
    start, chunks = (jnp.zeros((), form.dtype), zeros), _cut(form, hidden, targets, weights)
    (total, d_output), d_hidden = jax.lax.scan(add, start, chunks, unroll=form.unroll or 1)
    b, t, d = hidden.shape
    d_hidden = jnp.moveaxis(d_hidden, 0, 2 if form.context_sharded else 1).reshape(b, -1, d)[:, :t]
    d_output = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_output, output)
    return total, (d_hidden, d_output)


def _backward(
    form: ChunkedCrossEntropy, kept: tuple[jax.Array, OutputProjection], d_total: jax.Array
) -> tuple[jax.Array, OutputProjection, None, None]:
    d_hidden, d_output = jax.tree.map(lambda d: d * d_total.astype(d.dtype), kept)
    return d_hidden, d_output, None, None


_total.defvjp(_forward, _backward)


def _chunk_loss(
    form: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B, t, D]
    targets: jax.Array,  # [B, t]
    weights: jax.Array,  # [B, t]
) -> jax.Array:
    """The weighted sum over one chunk."""
    hidden, targets, weights = _rows(form, (hidden, targets, weights))
    logits = _logits(form, output, hidden)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if form.label_smoothing:
        mean = _mean(logits, form.vocab_size)
        chosen = (1 - form.label_smoothing) * chosen + form.label_smoothing * mean
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(losses * weights)


def _mean(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [...]
    """Over the words that are there. To cut out the others would move words between devices."""
    real = jnp.arange(logits.shape[-1]) < vocab_size
    real = real.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.sum(jnp.where(real, logits, 0), axis=-1) / vocab_size


def _rows(form: ChunkedCrossEntropy, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """[B, t, ...] -> [B t, ...]; as they are where T is spread, for both axes are then split."""
    if form.context_sharded:
        return chunk
    return tuple(array.reshape(-1, *array.shape[2:]) for array in chunk)


def _logits(
    form: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B t, D], or [B, t, D]
) -> jax.Array:  # [B t, V padded], or [B, t, V padded]
    logits = jnp.dot(hidden, output.matrix, preferred_element_type=jnp.dtype(form.dtype))
    if output.bias is not None:
        bias = output.bias.astype(logits.dtype)
        logits = logits + bias.reshape((1,) * (logits.ndim - 1) + (-1,))
    return mask_padded_logits(logits, form.vocab_size)


def _cut(form: ChunkedCrossEntropy, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] -> [chunks, B, t, ...]; what T lacks to a multiple has weight 0."""
    return tuple(_cut_one(array, form.num_chunks, form.context_sharded) for array in arrays)


def _cut_one(array: jax.Array, chunks: int, spread: bool) -> jax.Array:
    length = array.shape[1]
    if spread:  # every so-manyth token
        return jnp.moveaxis(array.reshape(len(array), -1, chunks, *array.shape[2:]), 2, 0)
    size = -(-length // chunks)
    pads = [(0, 0)] * array.ndim
    pads[1] = (0, size * chunks - length)
    padded = jnp.pad(array, pads)
    return padded.reshape(len(array), chunks, size, *array.shape[2:]).swapaxes(0, 1)

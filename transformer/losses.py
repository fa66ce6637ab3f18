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
from transformer.model import without_padding


class Loss(NamedTuple):
    """A loss as a sum and what it is the sum of: a mean is taken once, over everything."""

    total: jax.Array  # sum of the weighted losses, in nats
    weight: jax.Array  # sum of the weights


@dataclasses.dataclass(frozen=True)
class ChunkedCrossEntropy:
    """How a batch is cut. Chunks go along T, so that a batch stays spread over its devices."""

    vocab_size: int  # V without padding
    chunks: int = 1
    unroll: bool = False
    dtype: str = "float32"
    """Of the log-sum-exp and of the sum."""

    def __call__(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
    ) -> Loss:
        """Sum over tokens of weight * -log softmax(hidden matrix)[target]."""
        matrix = matrix.astype(hidden.dtype)
        weights = weights.astype(self.dtype)
        return Loss(_total(self, hidden, matrix, targets, weights), jnp.sum(weights))


def chunk_count(
    batch: int,  # B over all devices
    length: int,  # T
    vocab_rows: int,
    hardware: Hardware,
) -> int:
    """How many chunks keep one chunk's float32 logits on a device within a budget."""
    budget = 64 * 2**20 if hardware.platform == "cpu" else 512 * 2**20
    per_device = -(-batch // hardware.count) * length * vocab_rows * 4
    return max(1, min(length, math.ceil(per_device / budget)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(
    form: ChunkedCrossEntropy,
    hidden: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        loss, _ = _chunk_loss(form, matrix, *chunk)
        return total + loss, None

    start = jnp.zeros((), form.dtype)
    chunks = _cut(form, hidden, targets, weights)
    return jax.lax.scan(add, start, chunks, unroll=form.unroll or 1)[0]


def _forward(
    form: ChunkedCrossEntropy,
    hidden: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss, and its gradients in `hidden` and `matrix`, in one pass over the chunks."""

    def add(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total, d_matrix = carry
        h, t, w = chunk
        loss, pull = jax.vjp(lambda h, m: _chunk_loss(form, m, h, t, w)[0], h, matrix)
        d_h, d_m = pull(jnp.ones((), form.dtype))
        return (total + loss, d_matrix + d_m.astype(d_matrix.dtype)), d_h

    start = (jnp.zeros((), form.dtype), jnp.zeros(matrix.shape, form.dtype))
    chunks = _cut(form, hidden, targets, weights)
    (total, d_matrix), d_hidden = jax.lax.scan(add, start, chunks, unroll=form.unroll or 1)
    b, t, d = hidden.shape
    d_hidden = d_hidden.swapaxes(0, 1).reshape(b, -1, d)[:, :t]
    return total, (d_hidden, d_matrix.astype(matrix.dtype))


def _backward(
    form: ChunkedCrossEntropy, kept: tuple[jax.Array, jax.Array], d_total: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    d_hidden, d_matrix = kept
    scale_hidden, scale_matrix = (d_total.astype(each.dtype) for each in kept)
    return d_hidden * scale_hidden, d_matrix * scale_matrix, None, None


_total.defvjp(_forward, _backward)


def _chunk_loss(
    form: ChunkedCrossEntropy,
    matrix: jax.Array,  # [D, V padded]
    hidden: jax.Array,  # [B, t, D]
    targets: jax.Array,  # [B, t]
    weights: jax.Array,  # [B, t]
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum over one chunk, and each token's loss."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.dot(flat, matrix, preferred_element_type=jnp.dtype(form.dtype))
    logits = without_padding(logits, form.vocab_size)
    chosen = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(losses * weights.reshape(-1)), losses


def _cut(form: ChunkedCrossEntropy, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, T, ...] -> [chunks, B, t, ...]; what T lacks to a multiple has weight 0."""
    return tuple(_cut_one(array, form.chunks) for array in arrays)


def _cut_one(array: jax.Array, chunks: int) -> jax.Array:
    length = array.shape[1]
    size = -(-length // chunks)
    pads = [(0, 0)] * array.ndim
    pads[1] = (0, size * chunks - length)
    padded = jnp.pad(array, pads)
    return padded.reshape(len(array), chunks, size, *array.shape[2:]).swapaxes(0, 1)

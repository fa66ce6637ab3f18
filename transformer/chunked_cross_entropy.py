"""Cross-entropy over the vocabulary, fused with the output matrix and computed in chunks of T.

The logits [B, T, V] of a batch are never materialized. Per token, with z = h W + b, target y and
weight w:

    loss = w (logsumexp(z) - z_y)        dz = w (softmax(z) - onehot(y))
    dh = dz W^T        dW += h^T dz        db += dz

dz needs the logits, which exist only while their chunk is computed. So the forward pass computes
the gradients too: three products with W, as without chunks, where recomputing the logits in the
backward pass would take four. The residuals are d_hidden [B, T, D] and d_matrix [D, V], for any
number of chunks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.hardware import Hardware
from transformer.layers.activations import cap_logits
from transformer.shapes import check_shapes


class OutputProjection(NamedTuple):
    """Output matrix and bias, in the dtype of the hidden states."""

    matrix: jax.Array  # [D, V padded]
    bias: jax.Array | None  # [V padded]


@dataclasses.dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Chunked cross-entropy. Settings are static: `custom_vjp` keys on them, so they are hashable.

    T is split, and not B, so that B stays sharded over devices.
    """

    vocab_size: int  # V without padding
    num_chunks: int = 1
    """Number of chunks; see `choose_num_chunks`."""
    unroll: bool = False
    """Unroll the loop over chunks."""
    dtype: str = "float32"
    """Dtype of logits, the log-sum-exp and sums."""
    label_smoothing: float = 0.0
    """Probability mass of each target spread evenly over V tokens (Szegedy et al. 2016, section 7;
    Vaswani et al. 2017, section 5.4)."""
    soft_cap: float = 0.0
    """c of c tanh(logit / c). 0: no cap."""
    context_sharded: bool = False
    """True if T is sharded: each device then has its share of every chunk."""

    def __call__(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
        bias: jax.Array | None = None,  # [V padded]
    ) -> jax.Array:  # []
        """Return the sum over tokens of weight * -log softmax(hidden matrix + bias)[target].

        Targets of weight 0 are ignored and may be any number, such as -100.

        Raises:
          ValueError: If shapes or dtypes disagree.
        """
        return _sum_of_losses(self, hidden, *self._prepare(hidden, matrix, targets, weights, bias))

    def accuracy(
        self,
        hidden: jax.Array,  # [B, T, D]
        matrix: jax.Array,  # [D, V padded]
        targets: jax.Array,  # [B, T]
        weights: jax.Array,  # [B, T]
        bias: jax.Array | None = None,  # [V padded]
    ) -> jax.Array:  # []
        """Return the sum over tokens of weight * (1 if the target is the argmax); no gradient."""
        inputs = self._prepare(hidden, matrix, targets, weights, bias)
        return _sum_over_chunks(_chunk_accuracy, self, hidden, *inputs)

    def _prepare(
        self,
        hidden: jax.Array,
        matrix: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        bias: jax.Array | None,
    ) -> tuple[OutputProjection, jax.Array, jax.Array]:
        operands = dict(hidden=(hidden, "B T D", float), matrix=(matrix, "D V", float))
        labels = dict(targets=(targets, "B T", int), weights=(weights, "B T"))
        check_shapes(**operands, **labels, bias=(bias, "V | None", float))
        smoothing: Any = self.label_smoothing
        if not isinstance(smoothing, int | float) or not 0 <= smoothing < 1:
            shown = smoothing if isinstance(smoothing, float) else type(smoothing).__name__
            raise ValueError(f"label_smoothing {shown}: give a number in [0, 1)")
        # Cast once, not in every chunk: products of 16-bit hidden states are with 16-bit weights.
        output = jax.tree.map(lambda x: x.astype(hidden.dtype), OutputProjection(matrix, bias))
        weights = weights.astype(self.dtype)
        # An out-of-range index in `take_along_axis` gives NaN, and NaN * 0 is NaN.
        return output, jnp.where(weights != 0, targets, 0).astype(jnp.int32), weights


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
    # More chunks mean smaller products, which keep an accelerator less busy than a CPU.
    budget = 64 * 2**20 if hardware.platform == "cpu" else 512 * 2**20
    per_device = -(-batch_size // hardware.count) * length * padded_vocab_size * 4
    least = max(1, min(length, math.ceil(per_device / budget)))
    if context_shards == 1:
        return least
    each = length // context_shards
    return next((count for count in range(least, each) if each % count == 0), each)


def _sum_over_chunks(
    chunk_fn: Callable[..., jax.Array],
    settings: ChunkedCrossEntropy,
    hidden: jax.Array,  # [B, T, D]
    output: OutputProjection,
    targets: jax.Array,  # [B, T]
    weights: jax.Array,  # [B, T]
) -> jax.Array:  # []
    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return total + chunk_fn(settings, output, *chunk), None

    start = jnp.zeros((), settings.dtype)
    chunks = _split(settings, hidden, targets, weights)
    return jax.lax.scan(add, start, chunks, unroll=settings.unroll or 1)[0]


# Without `custom_vjp`, JAX would save the logits of every chunk for the backward pass of the scan:
# all of [B, T, V] at once, which the chunks avoid.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_losses(
    settings: ChunkedCrossEntropy,
    hidden: jax.Array,  # [B, T, D]
    output: OutputProjection,
    targets: jax.Array,  # [B, T]
    weights: jax.Array,  # [B, T]
) -> jax.Array:  # []
    """Return the loss. Called in evaluation; under `jax.grad`, `_forward` takes its place."""
    return _sum_over_chunks(_chunk_loss, settings, hidden, output, targets, weights)


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
        total, d_output = carry
        h, t, w = chunk
        # The cotangent of a sum is one scalar, the same for all chunks. It is not known yet, so
        # gradients are taken for a cotangent of 1, and `_backward` multiplies by the real one.
        loss, vjp = jax.vjp(lambda h, o: _chunk_loss(settings, o, h, t, w), h, output)
        d_h, d_o = vjp(jnp.ones((), settings.dtype))
        # The gradient of a matrix in 16 bits comes in 16 bits. Adding chunk after chunk in 16 bits
        # would drop most of the small late terms: the sum is in the dtype of the loss.
        d_output = jax.tree.map(lambda sum_, d: sum_ + d.astype(sum_.dtype), d_output, d_o)
        return (total + loss, d_output), d_h

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, settings.dtype), output)
    start = jnp.zeros((), settings.dtype), zeros
    chunks = _split(settings, hidden, targets, weights)
    (total, d_output), d_hidden = jax.lax.scan(add, start, chunks, unroll=settings.unroll or 1)
    d_output = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_output, output)
    return total, (_join(settings, d_hidden, hidden.shape), d_output)


def _backward(
    settings: ChunkedCrossEntropy, gradients: tuple[jax.Array, OutputProjection], d_total: jax.Array
) -> tuple[jax.Array, OutputProjection, None, None]:
    d_hidden, d_output = jax.tree.map(lambda d: d * d_total.astype(d.dtype), gradients)
    # Targets are integers, and nothing trains the weights: their cotangents are zero.
    return d_hidden, d_output, None, None


_sum_of_losses.defvjp(_forward, _backward)


def _chunk_loss(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B, t, D]
    targets: jax.Array,  # [B, t]
    weights: jax.Array,  # [B, t]
) -> jax.Array:  # []
    """Return the weighted sum of losses over one chunk."""
    hidden, targets, weights = _flatten(settings, hidden, targets, weights)
    logits = _logits(settings, output, hidden)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if smoothing := settings.label_smoothing:
        # The target distribution is (1 - s) onehot + s / V, and cross-entropy is linear in it:
        # the logit of the target becomes this weighted mean.
        mean = _mean(logits, settings.vocab_size)
        target_logits = (1 - smoothing) * target_logits + smoothing * mean
    # -log softmax(z)_y = logsumexp(z) - z_y: the softmax itself is never divided, nor its log
    # taken.
    losses = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(losses * weights)


def _chunk_accuracy(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B, t, D]
    targets: jax.Array,  # [B, t]
    weights: jax.Array,  # [B, t]
) -> jax.Array:  # []
    """Return the weight of the targets of one chunk that have the largest logit."""
    hidden, targets, weights = _flatten(settings, hidden, targets, weights)
    # Padding has the lowest number of all, so it is never the largest logit.
    best = jnp.argmax(_logits(settings, output, hidden), axis=-1)
    return jnp.sum((best == targets) * weights)


def _logits(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: jax.Array,  # [B t, D], or [B, t, D]
) -> jax.Array:  # [B t, V padded], or [B, t, V padded]
    # Sums of 16-bit products leave the matrix unit in `dtype`: rounded to 16 bits, logits of 100
    # would differ by steps of 0.5 in bfloat16.
    logits = jnp.dot(hidden, output.matrix, preferred_element_type=jnp.dtype(settings.dtype))
    if output.bias is not None:
        bias = output.bias.astype(logits.dtype)
        logits = logits + bias.reshape((1,) * (logits.ndim - 1) + (-1,))
    if settings.soft_cap:
        logits = cap_logits(logits, settings.soft_cap)
    # exp(padding - maximum) is exactly 0: no probability, and no gradient in its columns of W.
    return _mask_padded_logits(logits, settings.vocab_size)


def _mean(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [...]
    """Return the mean over V. Masked, not sliced: slicing a sharded axis would move rows."""
    in_vocab = (jnp.arange(logits.shape[-1]) < vocab_size).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.sum(jnp.where(in_vocab, logits, 0), axis=-1) / vocab_size


def _split(settings: ChunkedCrossEntropy, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Split each [B, T, ...] into [chunks, B, t, ...]; padding of T has weight 0."""
    count, length = settings.num_chunks, arrays[0].shape[1]
    if settings.context_sharded:
        # Strided, chunk c has tokens c, c + chunks, ...: contiguous chunks would each lie on one
        # device, which would compute while the others wait. Chunks divide a shard (see
        # `choose_num_chunks`), so no token leaves its device.
        strided = (a.reshape(len(a), -1, count, *a.shape[2:]) for a in arrays)
        return tuple(jnp.moveaxis(a, 2, 0) for a in strided)
    size = -(-length // count)

    def split(array: jax.Array) -> jax.Array:
        pads = [(0, 0), (0, size * count - length)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, pads)
        return padded.reshape(len(array), count, size, *array.shape[2:]).swapaxes(0, 1)

    return tuple(map(split, arrays))


def _join(
    settings: ChunkedCrossEntropy,
    chunks: jax.Array,  # [chunks, B, t, D]
    shape: tuple[int, ...],  # (B, T, D)
) -> jax.Array:  # [B, T, D]
    """Invert `_split`."""
    b, t, d = shape
    ordered = jnp.moveaxis(chunks, 0, 2 if settings.context_sharded else 1)
    return ordered.reshape(b, -1, d)[:, :t]


def _flatten(settings: ChunkedCrossEntropy, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reshape each [B, t, ...] to [B t, ...], so that the product with W is one of two matrices.

    Not if T is sharded: XLA can merge a sharded axis into another only by gathering it.
    """
    if settings.context_sharded:
        return arrays
    return tuple(array.reshape(-1, *array.shape[2:]) for array in arrays)


def _mask_padded_logits(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [..., V padded]
    """Replace the logits of vocabulary padding by the lowest finite number."""
    if logits.shape[-1] == vocab_size:
        return logits
    shape = (1,) * (logits.ndim - 1) + (-1,)
    in_vocab = (jnp.arange(logits.shape[-1]) < vocab_size).reshape(shape)
    return jnp.where(in_vocab, logits, jnp.finfo(logits.dtype).min)

"""Cross-entropy over the vocabulary, fused with the output matrix and computed in chunks of T.

The logits [B, T, V] of a batch are never materialized. Per token, with z = h W + b, target y and
weight w:

    loss = w (logsumexp(z) - z_y)        dz = w (softmax(z) - onehot(y))
    dh = dz W^T        dW += h^T dz        db += dz

dz needs the logits, which exist only while their chunk is computed. So the forward pass computes
the gradients too: three products with W, as without chunks, where recomputing the logits in the
backward pass would take four. The residuals are d_hidden [B, T, D] and d_matrix [D, V], for any
number of chunks.

Logits are float32, and dz is rounded to the dtype of the hidden states, as all gradients that enter
a product. On a GPU a product of float32 and bfloat16 would be one of two float32 matrices, in TF32
and at half the speed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Shaped

from transformer.hardware import Hardware, Platform
from transformer.layers.activations import cap_logits
from transformer.validation import check_shapes


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def logsumexp_in_one_pass(x: jax.Array, axis: int) -> jax.Array:
    """Return log sum exp(x) over an axis, which must not be sharded, in the dtype of x.

    The sum is float32: in 16 bits, 50,000 equal terms would stop adding up after some hundred.
    """
    MaxAndSum = tuple[jax.Array, jax.Array]

    def combine(a: MaxAndSum, b: MaxAndSum) -> MaxAndSum:
        (max_a, sum_a), (max_b, sum_b) = a, b
        largest = jnp.maximum(max_a, max_b)
        return largest, sum_a * jnp.exp(max_a - largest) + sum_b * jnp.exp(max_b - largest)

    wide = x.astype(jnp.float32)
    # Not -inf, whose difference to itself is NaN.
    start = jnp.finfo(jnp.float32).min, jnp.float32(0)
    largest, total = jax.lax.reduce((wide, jnp.ones_like(wide)), start, combine, (axis % x.ndim,))
    return (largest + jnp.log(total)).astype(x.dtype)


@logsumexp_in_one_pass.defjvp
def _jvp(
    axis: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # JAX cannot differentiate a reduction by a function of one's own. The gradient is the softmax.
    (x,), (dx,) = primals, tangents
    y = logsumexp_in_one_pass(x, axis)
    return y, jnp.sum(jnp.exp(x - jnp.expand_dims(y, axis)) * dx, axis)


CHUNK_BYTES: dict[Platform, int] = {"cpu": 64 * 2**20, "gpu": 2**30, "tpu": 512 * 2**20}
"""Budget for the float32 logits of a chunk on each device."""


class OutputProjection(NamedTuple):
    """Output matrix and bias, in the dtype of the hidden states."""

    matrix: Float[Array, "D Vp"]
    bias: Float[Array, "Vp"] | None


class Tokens(NamedTuple):
    """Hidden states and what to predict from them: of a batch, or of a chunk, where T is t."""

    hidden: Float[Array, "B T D"]
    targets: Int[Array, "B T"]
    weights: Float[Array, "B T"]


class TokenLogProbs(NamedTuple):
    """Log-probabilities at each place, in nats."""

    target: Float[Array, "B T"]
    top: Float[Array, "B T K"]
    """Those of the K likeliest tokens, in descending order."""
    top_tokens: Int[Array, "B T K"]


@dataclasses.dataclass(frozen=True)
class ChunkedCrossEntropy:
    """Chunked cross-entropy. Settings are static: `custom_vjp` keys on them, so they are hashable.

    T is split, and not B, so that B stays sharded over devices.
    """

    vocab_size: int  # V without padding
    num_chunks: int = 1
    """Number of chunks; see `choose_num_chunks`."""
    dtype: str = "float32"
    """Dtype of logits, the log-sum-exp and sums."""
    label_smoothing: float = 0.0
    """Probability mass of each target spread evenly over V tokens (Szegedy et al. 2016, section 7;
    Vaswani et al. 2017, section 5.4)."""
    soft_cap: float = 0.0
    """Soft cap c of the logits, c tanh(logit / c). 0: no cap."""
    one_pass: bool = False
    """Compute the log-sum-exp in one pass over the logits, in place of two."""
    context_sharded: bool = False
    """True if T is sharded: each device then has its share of every chunk."""

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        matrix: Float[Array, "D Vp"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        bias: Float[Array, "Vp"] | None = None,
    ) -> Float[Array, ""]:
        """Return the sum over tokens of weight * -log softmax(hidden matrix + bias)[target].

        Targets of weight 0 are ignored and may be any number, such as -100. Weights are constants,
        without a gradient. ValueError: shapes or dtypes disagree.
        """
        return _sum_of_losses(self, *self._prepare(hidden, matrix, targets, weights, bias))

    def accuracy(
        self,
        hidden: Float[Array, "B T D"],
        matrix: Float[Array, "D Vp"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        bias: Float[Array, "Vp"] | None = None,
    ) -> Float[Array, ""]:
        """Return the sum over tokens of weight * (1 if the target is the argmax); no gradient."""
        inputs = self._prepare(hidden, matrix, targets, weights, bias)
        return _sum_over_chunks(_chunk_accuracy, self, *inputs)

    def log_probs(
        self,
        hidden: Float[Array, "B T D"],
        matrix: Float[Array, "D Vp"],
        targets: Int[Array, "B T"],
        bias: Float[Array, "Vp"] | None = None,
        *,
        num_top: int = 1,
    ) -> TokenLogProbs:
        """Return log softmax(hidden matrix + bias) of the targets and the likeliest tokens."""
        ones = jnp.ones(targets.shape, self.dtype)
        tokens, output = self._prepare(hidden, matrix, targets, ones, bias)

        def score(chunk: Tokens) -> TokenLogProbs:
            flat = _flatten(self, chunk)
            logits = _logits(self, output, flat.hidden)
            normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            target = jnp.take_along_axis(logits, flat.targets[..., None], axis=-1) - normalizer
            top, top_tokens = jax.lax.top_k(logits, num_top)
            found = TokenLogProbs(target[..., 0], top - normalizer, top_tokens)
            return jax.tree.map(
                lambda leaf: leaf.reshape(*chunk.targets.shape, *leaf.shape[flat.targets.ndim :]),
                found,
            )

        length = targets.shape[1]
        scored: TokenLogProbs = jax.tree.map(
            lambda chunks: _join(self, chunks)[:, :length],
            jax.lax.map(score, _split(self, tokens)),
        )
        return scored

    def _prepare(
        self,
        hidden: Float[Array, "B T D"],
        matrix: Float[Array, "D Vp"],
        targets: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        bias: Float[Array, "Vp"] | None,
    ) -> tuple[Tokens, OutputProjection]:
        check_shapes(
            hidden=(hidden, "B T D", float),
            matrix=(matrix, "D V", float),
            targets=(targets, "B T", int),
            weights=(weights, "B T"),
            bias=(bias, "V | None", float),
        )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing {self.label_smoothing}: give a number in [0, 1)")
        # Cast once, not in every chunk: products of 16-bit hidden states are with 16-bit weights.
        output = jax.tree.map(lambda x: x.astype(hidden.dtype), OutputProjection(matrix, bias))
        weights = weights.astype(self.dtype)
        # An index of V or more in `take_along_axis` gives NaN, and NaN * 0 is NaN.
        targets = jnp.where(weights != 0, targets, 0).astype(jnp.int32)
        return Tokens(hidden, targets, weights), output


CPU_TOKENS_PER_WIDTH = 1.5
"""On a CPU a chunk may have as many tokens as this times D."""


def choose_num_chunks(
    batch_size: int,  # B over all devices
    length: int,  # T
    d_model: int,
    padded_vocab_size: int,
    hardware: Hardware,
    context_shards: int = 1,  # shards of T
) -> int:
    """Return the number of chunks that keeps a chunk's float32 logits within a budget per device.

    With a sharded T, chunks divide each shard evenly.
    """
    # Every chunk reads and writes the sum of d_matrix, and more chunks mean smaller products, which
    # keep an accelerator less busy than a CPU.
    budget: float = CHUNK_BYTES[hardware.platform]
    if hardware.platform == "cpu":
        # The sum and its next term are two arrays [D, V] where one chunk has only its logits [t, V]
        # and one of them.
        budget = max(budget, CPU_TOKENS_PER_WIDTH * d_model * padded_vocab_size * 4)
    per_device = -(-batch_size // hardware.count) * length * padded_vocab_size * 4
    min_count = max(1, min(length, math.ceil(per_device / budget)))
    if context_shards == 1:
        # Chunks of equal length need no padding.
        even = (count for count in range(min_count, 2 * min_count) if length % count == 0)
        return next(even, min_count)
    shard = length // context_shards
    return next((count for count in range(min_count, shard) if shard % count == 0), shard)


def _sum_over_chunks(
    chunk_fn: Callable[..., jax.Array],
    settings: ChunkedCrossEntropy,
    tokens: Tokens,
    output: OutputProjection,
) -> Float[Array, ""]:
    def add(total: jax.Array, chunk: Tokens) -> tuple[jax.Array, None]:
        return total + chunk_fn(settings, chunk, output), None

    start = jnp.zeros((), settings.dtype)
    return jax.lax.scan(add, start, _split(settings, tokens))[0]


# Without `custom_vjp`, JAX would save the logits of every chunk for the backward pass of the scan:
# all of [B, T, V] at once, which the chunks avoid.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_losses(
    settings: ChunkedCrossEntropy, tokens: Tokens, output: OutputProjection
) -> Float[Array, ""]:
    """Return the loss. Called in evaluation; under `jax.grad`, `_forward` takes its place."""
    return _sum_over_chunks(_chunk_loss, settings, tokens, output)


def _forward(
    settings: ChunkedCrossEntropy, tokens: Tokens, output: OutputProjection
) -> tuple[jax.Array, tuple[jax.Array, OutputProjection]]:
    """Compute the loss and its gradients in `hidden` and `output` in one pass over the chunks."""

    def add(carry: tuple[jax.Array, OutputProjection], chunk: Tokens) -> tuple[Any, jax.Array]:
        total, d_output = carry
        # The cotangent of a sum is one scalar, the same for all chunks. It is not known yet, so
        # gradients are taken for a cotangent of 1, and `_backward` multiplies by the real one.
        loss, d_h, d_o = _chunk_gradients(settings, chunk, output)
        return (total + loss, jax.tree.map(jnp.add, d_output, d_o)), d_h

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, settings.dtype), output)
    start, chunks = (jnp.zeros((), settings.dtype), zeros), _split(settings, tokens)
    (total, d_output), d_hidden = jax.lax.scan(add, start, chunks)
    d_output = jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_output, output)
    # `_split` moves and pads: its transpose puts chunks together again, without the padding.
    join = jax.linear_transpose(functools.partial(_split, settings), tokens.hidden)
    return total, (*join(d_hidden), d_output)


def _backward(
    settings: ChunkedCrossEntropy, gradients: tuple[jax.Array, OutputProjection], d_total: jax.Array
) -> tuple[Tokens, OutputProjection]:
    # Rounded to 16 bits, the factor would change all gradients alike.
    scale = lambda d: (d.astype(d_total.dtype) * d_total).astype(d.dtype)  # noqa: E731
    d_hidden, d_output = jax.tree.map(scale, gradients)
    # Targets are integers, and nothing trains the weights: their cotangents are zero.
    no_gradient: Any = None
    return Tokens(d_hidden, no_gradient, no_gradient), d_output


_sum_of_losses.defvjp(_forward, _backward)


def _chunk_loss(
    settings: ChunkedCrossEntropy, chunk: Tokens, output: OutputProjection
) -> Float[Array, ""]:
    """Return the weighted sum of losses over one chunk."""
    tokens = _flatten(settings, chunk)
    return _loss_of_logits(settings, tokens, _logits(settings, output, tokens.hidden))[0]


def _loss_of_logits(
    settings: ChunkedCrossEntropy,
    tokens: Tokens,
    logits: Float[Array, "... Vp"],
) -> tuple[Float[Array, ""], Float[Array, "..."]]:
    """Return the weighted sum of losses, and the log-sum-exp of the logits of each token."""
    target_logits = jnp.take_along_axis(logits, tokens.targets[..., None], axis=-1)[..., 0]
    if smoothing := settings.label_smoothing:
        # The target distribution is (1 - s) onehot + s / V, and cross-entropy is linear in it:
        # the logit of the target becomes this weighted mean.
        in_vocab = _in_vocab(logits, settings.vocab_size)
        # Masked, not sliced: slicing a sharded axis would move rows.
        mean = jnp.sum(jnp.where(in_vocab, logits, 0), axis=-1) / settings.vocab_size
        target_logits = (1 - smoothing) * target_logits + smoothing * mean
    logsumexp: Callable[..., jax.Array] = jax.nn.logsumexp
    if settings.one_pass:
        logsumexp = logsumexp_in_one_pass
    # -log softmax(z)_y = logsumexp(z) - z_y: no softmax is divided, and no log is taken of it.
    log_normalizer = logsumexp(logits, axis=-1)
    return jnp.sum((log_normalizer - target_logits) * tokens.weights), log_normalizer


def _chunk_gradients(
    settings: ChunkedCrossEntropy, chunk: Tokens, output: OutputProjection
) -> tuple[Float[Array, ""], Float[Array, "B t D"], OutputProjection]:  # in settings.dtype
    """Return the weighted sum of losses over one chunk, and its gradients in h, W and b.

    By the formulas, not by `jax.vjp`: so dz is one pass over the logits. The gradient of
    `take_along_axis` would be an array of zeros as large as they are, and one more pass.
    """
    tokens = _flatten(settings, chunk)
    hidden, targets, weights = tokens
    logits = _logits(settings, output, hidden)
    loss, log_normalizer = _loss_of_logits(settings, tokens, logits)
    # Columns of padding have a logit so low that the exponential is exactly 0.
    d_logits = jnp.exp(logits - log_normalizer[..., None])
    token = _last_axis(jnp.arange(logits.shape[-1], dtype=targets.dtype), logits.ndim)
    d_logits -= jnp.where(token == targets[..., None], 1 - settings.label_smoothing, 0)
    in_vocab = token < settings.vocab_size
    if settings.label_smoothing:
        d_logits -= jnp.where(in_vocab, settings.label_smoothing / settings.vocab_size, 0)
    if settings.soft_cap:
        # The derivative of c tanh(x / c) is 1 - tanh(x / c)^2. The square of padding overflows.
        d_logits *= jnp.where(in_vocab, 1 - jnp.square(logits / settings.soft_cap), 0)
    d_logits *= weights[..., None]
    rounded = d_logits.astype(hidden.dtype)
    d_hidden = jnp.einsum(
        "...v,dv->...d", rounded, output.matrix, out_sharding=_explicit_sharding(hidden)
    )
    d_matrix = jnp.einsum(
        "...d,...v->dv",
        hidden,
        rounded,
        # Adding chunk after chunk in 16 bits would drop most of the small late terms: sums leave
        # the matrix unit in the dtype of the loss.
        preferred_element_type=settings.dtype,
        out_sharding=_explicit_sharding(output.matrix),
    )
    d_bias = None if output.bias is None else jnp.sum(d_logits, axis=range(d_logits.ndim - 1))
    return loss, d_hidden.reshape(chunk.hidden.shape), OutputProjection(d_matrix, d_bias)


def _explicit_sharding(like: jax.Array) -> NamedSharding | None:
    """Return the sharding of an array, for a product of its shape; None without explicit axes.

    On a mesh with explicit axes a product over a sharded axis must state its result's sharding.
    """
    sharding: NamedSharding = jax.typeof(like).sharding
    return sharding if sharding.mesh.explicit_axes else None


def _chunk_accuracy(
    settings: ChunkedCrossEntropy, chunk: Tokens, output: OutputProjection
) -> Float[Array, ""]:
    """Return the weight of the targets of one chunk that have the largest logit."""
    hidden, targets, weights = _flatten(settings, chunk)
    # Padding has the lowest number of all, so it is never the largest logit.
    best = jnp.argmax(_logits(settings, output, hidden), axis=-1)
    return jnp.sum((best == targets) * weights)


def _logits(
    settings: ChunkedCrossEntropy,
    output: OutputProjection,
    hidden: Float[Array, "*tokens D"],
) -> Float[Array, "*tokens Vp"]:
    # Sums of 16-bit products leave the matrix unit in `dtype`: rounded to 16 bits, logits of 100
    # would differ by steps of 0.5 in bfloat16.
    logits = jnp.dot(hidden, output.matrix, preferred_element_type=jnp.dtype(settings.dtype))
    if output.bias is not None:
        logits += _last_axis(output.bias.astype(logits.dtype), logits.ndim)
    if settings.soft_cap:
        logits = cap_logits(logits, settings.soft_cap)
    if logits.shape[-1] == settings.vocab_size:
        return logits
    # exp(padding - maximum) is exactly 0: no probability, and no gradient in its columns of W.
    lowest = jnp.finfo(logits.dtype).min
    return jnp.where(_in_vocab(logits, settings.vocab_size), logits, lowest)


def _in_vocab(logits: jax.Array, vocab_size: int) -> Bool[Array, "1 ... Vp"]:
    """Return True for logits that are not padding of the vocabulary."""
    return _last_axis(jnp.arange(logits.shape[-1]) < vocab_size, logits.ndim)


def _last_axis(vector: Shaped[Array, "n"], ndim: int) -> Shaped[Array, "... n"]:
    """Return the vector as an array of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def _split(settings: ChunkedCrossEntropy, arrays: Any) -> Any:
    """Split each [B, T, ...] into [chunks, B, t, ...]; padding of T has weight 0."""
    count = settings.num_chunks

    def split(array: jax.Array) -> jax.Array:
        batch_size, length, *rest = array.shape
        size = -(-length // count)
        if settings.context_sharded:
            # Strided, chunk c has tokens c, c + chunks, ...: contiguous chunks would each lie on
            # one device, which would compute while the others wait. Chunks divide a shard (see
            # `choose_num_chunks`), so no token leaves its device.
            return jnp.moveaxis(array.reshape(batch_size, size, count, *rest), 2, 0)
        padded = jnp.pad(array, [(0, 0), (0, size * count - length), *[(0, 0)] * len(rest)])
        return padded.reshape(batch_size, count, size, *rest).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def _join(
    settings: ChunkedCrossEntropy, chunks: Shaped[Array, "chunks B t ..."]
) -> Shaped[Array, "B T ..."]:
    """Put the chunks of `_split` together again, with the padding of T."""
    joined = jnp.moveaxis(chunks, 0, 2 if settings.context_sharded else 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])


def _flatten(settings: ChunkedCrossEntropy, chunk: Tokens) -> Tokens:
    """Reshape each [B, t, ...] to [B t, ...], so that the product with W is one of two matrices.

    Not if T is sharded: XLA can merge a sharded axis into another only by gathering it.
    """
    if settings.context_sharded:
        return chunk
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), chunk)

"""Linear recurrences with gates, in chunks: what Gated DeltaNet and Mamba-2 share.

Each of N heads has a matrix S [H, Hv] as its state, which decays by a_t in (0, 1] and is written
to at the key k_t:

    S_t = a_t S_(t-1) + k_t u_t^T,    y_t = S_t^T q_t
    u_t = v_t                                        state-space duality (Dao and Gu 2024)
    u_t = b_t (v_t - a_t S_(t-1)^T k_t)              gated delta rule (Yang et al. 2024)

The second moves the value that the state returns for k_t towards v_t, by a fraction b_t.

Within a chunk, with the product d_ij of the decays after token j up to token i, and d_i of those
from the first token of the chunk on, and with the state S before the chunk:

    y_i = d_i S^T q_i + sum over j <= i of d_ij (q_i . k_j) u_j

and for the delta rule u solves the unit lower triangular system (the UT transform: Yang et al.
2024, section 3.3; Joffrain et al. 2006)

    u_i + sum over j < i of b_i d_ij (k_i . k_j) u_j = b_i (v_i - d_i S^T k_i)
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from transformer.attention.document_boundaries import DocumentBoundaries
from transformer.attention.mixer import Mixer, MixerInputs
from transformer.attention.sparse_ops.local_window import NeighborCache, neighbor_window
from transformer.attention.variants.chunks import ACCUMULATION_DTYPE, ChunkDocuments, Chunking
from transformer.layers.basic import apply_linear, declare_weight
from transformer.model_context import Initializer

MIN_STEP, MAX_STEP, STEP_FLOOR = 1e-3, 0.1, 1e-4
"""Range and floor of the first steps softplus(dt_bias) (Gu and Dao 2023, section 3.6)."""


class RecurrentState(struct.PyTreeNode):
    """Cache of a gated recurrence: the states, and the last inputs of its convolutions."""

    state: Float32[Array, "B N H Hv"]
    conv_inputs: tuple[NeighborCache, ...]  # [B, kernel size - 1, heads, width] each

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        kernel_size: int,
        query: tuple[int, int],  # heads and width of the queries, and of the keys
        value: tuple[int, int],  # N, Hv
        dtype: Any,  # of the convolutions' inputs
    ) -> "RecurrentState":
        """Return the state before the first token."""
        shape = (batch_size, value[0], query[1], value[1])
        conv_inputs = (
            NeighborCache.empty(batch_size, kernel_size - 1, heads, dtype)
            for heads in (query, query, value)
        )
        return cls(jnp.zeros(shape, ACCUMULATION_DTYPE), tuple(conv_inputs))


class ConvolvedHeads(NamedTuple):
    """Inputs of a recurrence, and the inputs of the convolutions that made them."""

    q: Float[Array, "B T K H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T N Hv"]
    conv_inputs: tuple[NeighborCache, ...] | None  # with the new tokens; None without a cache


def project_heads(
    mixer: Mixer,
    x: Float[Array, "B T D"],
    inputs: MixerInputs,
    query: Mapping[str, int],  # axes of queries and of keys
    value: Mapping[str, int],
    *,
    bias: bool = False,
    conv_bias: bool = False,
) -> ConvolvedHeads:
    """Project x to queries, keys and values, and apply a causal convolution and SiLU to each.

    The weights are `query`, `query_taps` and so on of a mixer with a `kernel_size`.
    """
    embed, cache = {"embed": mixer.context.d_model}, inputs.cache
    convolved, conv_inputs = [], []
    for index, (name, axes) in enumerate((("query", query), ("key", query), ("value", value))):
        heads = apply_linear(mixer, name, x, embed, axes, mixer.context, bias=bias)
        previous = None if cache is None else cache.conv_inputs[index]
        convolved.append(_convolve(mixer, name, heads, axes, inputs, previous, conv_bias))
        if previous is not None:
            conv_inputs.append(previous.append(heads, inputs.positions))
    q, k, v = convolved
    return ConvolvedHeads(q, k, v, None if cache is None else tuple(conv_inputs))


def _convolve(
    mixer: Mixer,
    name: str,
    x: Float[Array, "B T heads H"],
    axes: Mapping[str, int],
    inputs: MixerInputs,
    cache: NeighborCache | None,
    bias: bool,
) -> Float[Array, "B T heads H"]:
    """Return SiLU of a weighted sum of each token and those before it in its document."""
    kernel_size, context = mixer.config.kernel_size, mixer.context
    declare = functools.partial(declare_weight, mixer, dtype=context.precision.parameters)
    # As in PyTorch, whose initial values the papers keep: uniform within 1 / sqrt(fan-in).
    init = uniform_initializer(-1 / math.sqrt(kernel_size), 1 / math.sqrt(kernel_size))
    taps = declare(f"{name}_taps", outputs={"taps": kernel_size, **axes}, init=init)
    windows = neighbor_window(
        x, kernel_size - 1, 0, positions=inputs.positions, mask=inputs.mask, cache=cache
    )
    y = jnp.sum(windows * taps.astype(x.dtype)[None, None], axis=2)
    if bias:
        init = jax.nn.initializers.zeros
        y = y + declare(f"{name}_taps_bias", outputs=axes, init=init).astype(y.dtype)[None, None]
    return context.constrain(jax.nn.silu(y), ("batch", "length", next(iter(axes)), None))


def uniform_initializer(low: float, high: float) -> Initializer:
    """Return the initializer of values between `low` and `high`."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, low, high)


def log_rate_initializer(low: float, high: float) -> Initializer:
    """Return the initializer of logarithms of rates A between `low` and `high`."""
    return lambda key, shape, dtype: jnp.log(jax.random.uniform(key, shape, dtype, low, high))


def step_bias_initializer(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return the values whose softplus is a step, log-uniform from `MIN_STEP` to `MAX_STEP`."""
    low, high = math.log(MIN_STEP), math.log(MAX_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    step = jnp.maximum(step, STEP_FLOOR)
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


def declare_steps(
    mixer: Mixer,
    x: Float[Array, "B T *heads"],
    axes: Mapping[str, int],  # of the heads
    rates: Initializer,  # of log A
) -> tuple[Float32[Array, "B T *heads"], Float32[Array, "B T *heads"]]:
    """Return the step softplus(x + dt_bias) of each token and head, and log a = -A step."""
    declare = functools.partial(
        declare_weight, mixer, outputs=axes, dtype=mixer.context.precision.parameters
    )
    a_log = declare("a_log", init=rates).astype(ACCUMULATION_DTYPE)[None, None]
    bias = declare("dt_bias", init=step_bias_initializer).astype(ACCUMULATION_DTYPE)[None, None]
    step = jax.nn.softplus(x.astype(ACCUMULATION_DTYPE) + bias)
    return step, -jnp.exp(a_log) * step


def scan_chunks(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T N Hv"],
    log_decay: Float32[Array, "B T N"],  # log a_t <= 0
    write_strength: Float[Array, "B T N"] | None,  # b_t of the delta rule; None: u_t = v_t
    boundaries: DocumentBoundaries | None,
    state: Float32[Array, "B N H Hv"] | None = None,  # before the first token; None: zeros
) -> tuple[Float32[Array, "B T N Hv"], Float32[Array, "B N H Hv"]]:  # y, S after the last token
    """Run the recurrence over a row, each K heads of queries and keys for N / K heads of values.

    The backward pass recomputes each chunk from its inputs and the state before it. Outputs at
    padding are zero.
    """
    batch, length, num_groups, width = k.shape
    groups = (num_groups, v.shape[2] // num_groups)
    if state is None:
        state = jnp.zeros((batch, v.shape[2], width, v.shape[3]), ACCUMULATION_DTYPE)
    chunking = Chunking.of(length)
    documents = chunking.split_documents(boundaries)

    def split(x: jax.Array) -> jax.Array:  # [B, T, N, H] -> [chunks, B, K, N / K, C, H]
        return chunking.split(x.reshape(batch, length, *groups, -1).astype(ACCUMULATION_DTYPE))

    is_token = None if boundaries is None else boundaries.is_token[:, :, None]

    def split_scalars(x: jax.Array) -> jax.Array:  # [B, T, N] -> [chunks, B, K, N / K, C]
        # At padding the state neither decays nor is written to.
        return split(x if is_token is None else jnp.where(is_token, x, 0))[..., 0]

    chunks = _Chunk(
        q=chunking.split(q.astype(ACCUMULATION_DTYPE)),
        k=chunking.split(k.astype(ACCUMULATION_DTYPE)),
        v=split(v),
        log_decay=split_scalars(log_decay),
        write_strength=None if write_strength is None else split_scalars(write_strength),
        documents=documents,
    )
    # As in attention by feature maps: no CSE has to be prevented inside a scan.
    step = jax.checkpoint(_read_chunk, prevent_cse=False)
    carry = _Carry(
        state.reshape(batch, *groups, width, -1), jnp.zeros_like(documents.document[0, :, 0])
    )
    carry, y = jax.lax.scan(step, carry, chunks)
    y = chunking.join(y).reshape(v.shape)
    if is_token is not None:
        y = jnp.where(is_token[..., None], y, 0)
    return y, carry.state.reshape(state.shape)


class _Chunk(NamedTuple):
    """Inputs of one chunk of C tokens. All chunks are stacked along a leading axis."""

    q: Float32[Array, "B K C H"]
    k: Float32[Array, "B K C H"]
    v: Float32[Array, "B K G C Hv"]
    log_decay: Float32[Array, "B K G C"]
    write_strength: Float32[Array, "B K G C"] | None
    documents: ChunkDocuments


class _Carry(NamedTuple):
    """State between two chunks."""

    state: Float32[Array, "B K G H Hv"]
    document: Int[Array, "#B"]  # number of the document that the state is of


def _read_chunk(carry: _Carry, chunk: _Chunk) -> tuple[_Carry, Float32[Array, "B K G C Hv"]]:
    q, k, v, log_decay, write_strength, (document, key_document) = chunk
    up_to = jnp.tri(k.shape[2], dtype=ACCUMULATION_DTYPE)
    same_document = document[:, :, None] == document[:, None, :]
    visible = (document[:, :, None] == key_document[:, None, :]) & (up_to > 0)[None]
    sees_state = (document == carry.document[:, None])[:, None, None]  # [B or 1, 1, 1, C]

    # Sums of log decays after token j up to token i. They are no differences of cumulative sums:
    # those lose digits after a large decay, and depend on the documents before. As products they
    # have to be exact: a rounded logarithm is a wrong factor.
    after = same_document & (up_to.T == 0)[None]  # [B or 1, token, j]
    sum_up_to = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    terms = jnp.where(after[:, None, None], log_decay[..., None], 0)
    decay = jnp.exp(sum_up_to("TU,BKGUS->BKGTS", up_to, terms))
    decay = jnp.where(visible[:, None, None], decay, 0)
    terms = jnp.where(sees_state, log_decay, 0)
    state_decay = jnp.where(sees_state, jnp.exp(sum_up_to("TU,BKGU->BKGT", up_to, terms)), 0)

    def read_state(x: jax.Array) -> jax.Array:  # [B, K, C, H] -> [B, K, G, C, Hv]
        return jnp.einsum("BKTH,BKGHV->BKGTV", x, carry.state) * state_decay[..., None]

    written = v
    if write_strength is not None:
        similarity = jnp.einsum("BKTH,BKSH->BKTS", k, k)[:, :, None]
        system = write_strength[..., None] * similarity * decay
        written = write_strength[..., None] * (v - read_state(k))
        if k.shape[2] > 1:
            # Reads the part below the diagonal. Forward substitution, so earlier tokens do not
            # depend on later ones.
            written = jax.lax.linalg.triangular_solve(
                system, written, left_side=True, lower=True, unit_diagonal=True
            )
    scores = jnp.einsum("BKTH,BKSH->BKTS", q, k)[:, :, None] * decay
    y = read_state(q) + jnp.einsum("BKGTS,BKGSV->BKGTV", scores, written)
    # The state after the chunk is what its last token sees.
    added = jnp.einsum("BKSH,BKGSV->BKGHV", k, decay[..., -1, :, None] * written)
    state = carry.state * state_decay[..., -1, None, None] + added
    return _Carry(state, document[:, -1]), y

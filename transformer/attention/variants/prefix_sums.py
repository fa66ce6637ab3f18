"""Attention by feature maps as prefix sums of features times values.

If a weight is a dot product of features, phi(q) . phi(k), the sum over keys of phi(k) v can be
computed before the query is known (Katharopoulos et al. 2020, section 3.2). Nothing of size T x S
exists. A causal pass is a scan over chunks of C tokens: matmuls within a chunk, a running sum
between chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from transformer.attention.document_boundaries import DocumentBoundaries

CHUNK_SIZE = 64
"""C, tokens per chunk of a causal pass."""


ACCUMULATION_DTYPE = jnp.float32
"""Dtype of features and sums under every precision policy, because sums grow with T."""


MIN_ABS_NORMALIZER = 1e-6
"""Smallest absolute sum of signed weights; anything smaller is rounding error."""


class Features(NamedTuple):
    """Feature vectors `values * exp(log_scale)`.

    The scale is separate because its exponential may overflow.
    """

    values: jax.Array  # [..., M]
    log_scale: jax.Array | None = None  # [...]; None: 0
    signed: bool = False
    """Features, and so attention weights, may be negative."""


FeatureMap = Callable[[jax.Array], Features]
"""Map from queries or keys [..., H] to their features [..., M]."""


class LinearAttentionState(struct.PyTreeNode):
    """Sums over all keys so far, which are also the cache; the size is independent of their number.

    Float32 under every precision policy, stored too: a bfloat16 sum of more than 256 equal terms
    does not grow any more.
    """

    kv_sums: jax.Array  # [B, K, M, H of values + 1] features times (values, 1)
    log_scale: jax.Array  # [B, K] logarithm of the scale divided out of `kv_sums`

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        num_kv_heads: int,  # K
        num_features: int,  # M
        head_dim: int,  # H of values
    ) -> "LinearAttentionState":
        """Return the state before the first token."""
        heads = (batch_size, num_kv_heads)
        kv_sums = jnp.zeros((*heads, num_features, head_dim + 1), ACCUMULATION_DTYPE)
        return cls(kv_sums, jnp.full(heads, -jnp.inf, ACCUMULATION_DTYPE))


def sum_keys(
    k: Features,  # of [B, S, K]
    v: jax.Array,  # [B, S, K, H of values]
    is_token: jax.Array | None,  # [B or 1, S] False for padding
) -> LinearAttentionState:
    """Sum over all keys, relative to the largest scale among them."""
    key_log_scale = (
        jnp.zeros(v.shape[:3], ACCUMULATION_DTYPE) if k.log_scale is None else k.log_scale
    )
    if is_token is not None:
        key_log_scale = jnp.where(is_token[:, :, None], key_log_scale, -jnp.inf)
    log_scale = jax.lax.stop_gradient(key_log_scale.max(axis=1))
    scaled_values = (
        k.values * jnp.exp(key_log_scale - _finite_or_zero(log_scale)[:, None])[..., None]
    )
    kv_sums = jnp.einsum("BSKM,BSKH->BKMH", scaled_values, _append_ones(v))
    return LinearAttentionState(kv_sums, log_scale)


def read_state(
    q: Features,  # of [B, T, N]
    state: LinearAttentionState,
) -> jax.Array:  # [B, T, N, H of values]
    """Attend from queries to summed keys. Scales common to numerator and denominator cancel."""
    b, t, n, m = q.values.shape
    grouped = q.values.reshape(b, t, state.kv_sums.shape[1], -1, m)
    sums = jnp.einsum("BTKGM,BKMH->BTKGH", grouped, state.kv_sums)
    return _normalize(sums, q.signed).reshape(b, t, n, -1)


def attend_causal(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    feature_map: FeatureMap,
    boundaries: DocumentBoundaries | None,
    state: LinearAttentionState | None = None,  # of previous tokens; None: no tokens
) -> tuple[jax.Array, LinearAttentionState]:  # [B, T, N, H of values], sums after the last token
    """Attend from each query to the keys of its document up to its own.

    The backward pass recomputes each chunk from its inputs and the state before it, so memory is
    T (M / `CHUNK_SIZE` + a few) H in both passes. Features exist for one chunk at a time.
    """
    batch, length, num_kv_heads, _ = k.shape
    num_chunks = -(-length // CHUNK_SIZE)
    if state is None:
        num_features = jax.eval_shape(feature_map, k).values.shape[-1]
        state = LinearAttentionState.empty(batch, num_kv_heads, num_features, v.shape[-1])
    # Equal chunks, not full ones and a rest: 65 tokens are 2 chunks of 33, padded by 1.
    size = -(-length // num_chunks)
    split = functools.partial(_split_chunks, num_chunks=num_chunks, size=size)
    grouped_q = q.reshape(batch, length, num_kv_heads, -1, q.shape[-1])
    tokens = _chunk_boundaries(boundaries, length, num_chunks, size)
    chunks = _Chunk(split(grouped_q), split(k), split(v), *tokens)
    # Recompute each chunk in the backward pass: its features and scores are not saved. Inside a
    # scan XLA cannot merge the recomputation with the forward pass, so no CSE has to be prevented.
    step = jax.checkpoint(functools.partial(_attend_chunk, feature_map), prevent_cse=False)
    final: LinearAttentionState
    final, y = jax.lax.scan(step, state, chunks)  # y [chunks, B, K, G, C, H of values]
    y = jnp.moveaxis(jnp.moveaxis(y, 0, 1), -2, 2)
    y = y.reshape(batch, num_chunks * size, q.shape[2], -1)
    return y[:, :length].astype(v.dtype), final


class _Chunk(NamedTuple):
    """Inputs of one chunk of C tokens. All chunks are stacked along a leading axis."""

    q: jax.Array  # [B, K, G, C, H]
    k: jax.Array  # [B, K, C, H]
    v: jax.Array  # [B, K, C, H of values]
    document: jax.Array  # [B or 1, C] index of the document in the row
    is_token: jax.Array  # [B or 1, C] False: padding
    state_document: jax.Array  # [B or 1] document of the state before the chunk


def _attend_chunk(
    feature_map: FeatureMap, state: LinearAttentionState, chunk: _Chunk
) -> tuple[LinearAttentionState, jax.Array]:
    q, k = (feature_map(each.astype(ACCUMULATION_DTYPE)) for each in (chunk.q, chunk.k))
    v = _append_ones(chunk.v)
    # Keys visible within the chunk: same document, not padding, not after the query.
    same_document = chunk.document[:, :, None] == chunk.document[:, None, :]
    causal = jnp.tri(same_document.shape[1], dtype=bool)[None]
    visible = same_document & chunk.is_token[:, None, :] & causal
    # Queries that still belong to the document of the state.
    sees_state = chunk.document == chunk.state_document[:, None]
    weights, state_scale, log_scale = _relative_scales(
        k.log_scale, state.log_scale, visible, sees_state
    )
    scores = jnp.einsum("BKGTM,BKSM->BKGTS", q.values, k.values) * weights[:, :, None]
    # Values carry a column of ones, so one matmul gives the numerator and the normalizer.
    sums = jnp.einsum("BKGTS,BKSH->BKGTH", scores, v)
    from_state = jnp.einsum("BKGTM,BKMH->BKGTH", q.values, state.kv_sums)
    sums = sums + from_state * state_scale[:, :, None, :, None]
    # The state after the chunk is what its last token sees: reuse that token's weights.
    added = jnp.einsum("BKSM,BKSH->BKMH", k.values * weights[:, :, -1, :, None], v)
    kv_sums = state.kv_sums * state_scale[:, :, -1, None, None] + added
    return LinearAttentionState(kv_sums, log_scale), _normalize(sums, q.signed)


def _relative_scales(
    key_log_scale: jax.Array | None,  # [B, K, C] of the chunk's keys
    state_log_scale: jax.Array,  # [B, K] of the sums
    visible: jax.Array,  # [B or 1, C, C] keys of the chunk that each token sees
    sees_state: jax.Array,  # [B or 1, C] True: it sees the state too
) -> tuple[jax.Array, jax.Array, jax.Array]:  # of keys [B, K, C, C], of sums [B, K, C], [B, K]
    """Return scale factors relative to the largest scale that each query sees (a running maximum).

    One maximum over all keys, or over the chunk, would give the same quotient in exact arithmetic.
    But if it is far larger than every scale a query sees, the query's sums underflow to zero, which
    depends on future keys and breaks causality.
    """
    if key_log_scale is None:
        return (
            visible[:, None].astype(ACCUMULATION_DTYPE),
            sees_state[:, None].astype(ACCUMULATION_DTYPE),
            state_log_scale,
        )
    key_scales = jnp.where(visible[:, None], key_log_scale[:, :, None, :], -jnp.inf)
    state_scales = jnp.where(sees_state[:, None], state_log_scale[:, :, None], -jnp.inf)
    log_scale = jax.lax.stop_gradient(jnp.maximum(key_scales.max(axis=-1), state_scales))
    finite = _finite_or_zero(log_scale)
    return (
        jnp.exp(key_scales - finite[..., None]),
        jnp.exp(state_scales - finite),
        log_scale[:, :, -1],
    )


def _chunk_boundaries(
    boundaries: DocumentBoundaries | None, length: int, num_chunks: int, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:  # the last three fields of all chunks
    is_start, is_token = jnp.zeros((1, length), bool), jnp.ones((1, length), bool)
    if boundaries is not None:
        is_start, is_token = boundaries
    padding = ((0, 0), (0, num_chunks * size - length))
    # Documents are numbered by their starts: a document that continues from a cache is number 0,
    # that of the state before the first chunk.
    document = jnp.pad(jnp.cumsum(is_start, axis=1), padding, mode="edge")
    document = document.reshape(-1, num_chunks, size)
    is_token = jnp.pad(jnp.broadcast_to(is_token, is_start.shape), padding).reshape(document.shape)
    state_document = jnp.pad(document[:, :-1, -1], ((0, 0), (1, 0)))
    return document.swapaxes(0, 1), is_token.swapaxes(0, 1), state_document.swapaxes(0, 1)


def _split_chunks(x: jax.Array, num_chunks: int, size: int) -> jax.Array:
    """Cut tokens into chunks, padded with zeros: [B, T, K, ..., H] -> [chunks, B, K, ..., C, H]."""
    padding = [(0, 0), (0, num_chunks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    chunks = jnp.pad(x, padding).reshape(x.shape[0], num_chunks, size, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(chunks, 2, -2), 1, 0)


def _append_ones(v: jax.Array) -> jax.Array:  # [..., H of values] -> [..., H of values + 1]
    """Append a column of ones, whose weighted sum is the sum of the weights."""
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1).astype(ACCUMULATION_DTYPE)


def _normalize(sums: jax.Array, signed: bool) -> jax.Array:  # [..., H + 1] -> [..., H]
    """Divide weighted values by the sum of the weights; zeros where no key is visible."""
    total = sums[..., -1:]
    if signed:
        sign = jnp.where(total < 0, -1.0, 1.0)
        total = sign * jnp.maximum(jnp.abs(total), MIN_ABS_NORMALIZER)
    else:
        total = jnp.where(total > 0, total, 1)
    # Scale numerator and denominator first: the gradient of a quotient squares the denominator,
    # which would underflow for small sums.
    scale = jax.lax.stop_gradient(1 / total)
    return sums[..., :-1] * scale / (total * scale)


def _finite_or_zero(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)

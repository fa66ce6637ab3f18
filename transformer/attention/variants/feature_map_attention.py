"""Attention by feature maps: sums of features times values, over all keys or as a causal pass.

The weight of a key is a dot product of features, phi(q) . phi(k), in place of exp(q . k). The
papers call such a function of q and k a kernel; here the word is left to programs of GPUs and TPUs.
So the sum over keys of phi(k) v can be computed before the query is known (Katharopoulos et al.
2020, section 3.2), and nothing of size T x S exists. A causal pass is a scan over chunks of C
tokens: matmuls within a chunk, a running sum between chunks.

Linear attention and Performer differ only in their feature map.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from transformer.attention.document_boundaries import (
    DocumentBoundaries,
    document_boundaries,
    segments_of_keys,
)
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Mixer,
    MixerInputs,
    ScoreFlops,
    reject_mask_patterns,
)
from transformer.attention.projections import (
    MultiHeadConfig,
    project_keys,
    project_qkv,
    project_queries,
    project_values,
)
from transformer.attention.variants.chunks import ACCUMULATION_DTYPE, ChunkDocuments, Chunking

MIN_ABS_NORMALIZER = 1e-6
"""Smallest absolute sum of signed weights; anything smaller is rounding error."""


class Features(NamedTuple):
    """Feature vectors `values * exp(log_scale)`.

    The scale is separate because its exponential may overflow.
    """

    values: Float[Array, "... M"]
    log_scale: Float[Array, "..."]
    signed: bool = False
    """Features, and so attention weights, may be negative."""


FeatureMap = Callable[[jax.Array], Features]
"""Map from queries or keys [..., H] to their features [..., M]."""


class LinearAttentionState(struct.PyTreeNode):
    """Sums over all keys so far, which are also the cache; the size is independent of their number.

    Float32 under every precision policy, stored too: a bfloat16 sum of more than 256 equal terms
    does not grow any more.
    """

    kv_sums: Float[Array, "B K M Hv_plus_1"]  # features times (values, 1)
    log_scale: Float[Array, "B K"]  # logarithm of the scale divided out of `kv_sums`

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


class LinearAttentionMemory(struct.PyTreeNode):
    """Cross-attention cache: the sums over a memory of one document."""

    state: LinearAttentionState


def feature_map_flops(
    config: MultiHeadConfig,
    width: int,  # D
    num_features: int,  # M
    num_random_vectors: int,  # random vectors that each query and key is multiplied by; 0: none
) -> ScoreFlops:
    """Count FLOPs of features, of their sums with values and of reading them; independent of T."""
    head_dim = config.resolved_head_dim(width)
    flops = (config.num_heads + config.resolved_num_kv_heads) * (
        num_random_vectors * head_dim + num_features * (head_dim + 1)
    )
    return ScoreFlops(full=2 * flops, causal=2 * flops)


def attend_with_feature_map(
    mixer: Mixer,
    x: Float[Array, "B T D"],
    feature_map: FeatureMap,
    inputs: MixerInputs,
) -> tuple[Float[Array, "B T N H"], LinearAttentionState | LinearAttentionMemory | None]:  # cache
    """Declare the query, key and value projections of `mixer` and attend by features.

    Under a causal mask, each document must be contiguous in its row.

    Raises:
      ValueError: The mask is more than causality, segments and lengths, or a cache is given without
        a causal mask.
    """
    config = mixer.config
    mask, memory, cache = inputs.mask, inputs.memory, inputs.cache
    if not mask.pattern.causal:  # sums over all keys do not depend on the order of tokens
        mask = mask.replace(pattern=dataclasses.replace(mask.pattern, ordered=True))
    reject_mask_patterns(config.kind, mask)

    if memory is not None or isinstance(cache, LinearAttentionMemory):
        if mask.pattern.causal or isinstance(cache, LinearAttentionState):
            raise ValueError(
                f"mixer {config.kind}: attends to the whole memory; give a mask that is not "
                "causal, and no cache or one from init_memory_cache"
            )
        q = project_queries(mixer, x)
        if memory is not None:
            k = project_keys(mixer, memory)
            v = project_values(mixer, memory)
            if cache is None:
                return attend_bidirectional(q, k, v, feature_map, mask), None
            segments = segments_of_keys(mask, k.shape[1])
            cache = LinearAttentionMemory(sum_keys(k, v, feature_map, segments))
        return read_state(q, feature_map, cache.state), cache

    q, k, v = project_qkv(mixer, x, inputs.positions)
    if not mask.pattern.causal:
        if cache is not None:
            raise ValueError(
                f"mixer {config.kind}: decoding with a cache needs a causal mask; give one"
            )
        return attend_bidirectional(q, k, v, feature_map, mask), None
    boundaries = document_boundaries(mask, inputs.positions, cached=cache is not None)
    y, state = attend_causal(q, k, v, feature_map, boundaries, cache)
    if mask.segments is not None:
        # Padding queries read the sums of the document before them.
        y = jnp.where((mask.segments != 0)[:, :, None, None], y, 0)
    return y, None if cache is None else state


def attend_bidirectional(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    feature_map: FeatureMap,
    mask: Mask,
) -> Float[Array, "B T N Hv"]:
    """Attend from each query to all keys of its document; packed rows cost a causal pass."""
    query_segments, key_segments = mask.segments, segments_of_keys(mask, k.shape[1])

    def attend_all() -> jax.Array:
        return read_state(q, feature_map, sum_keys(k, v, feature_map, key_segments))

    if query_segments is None or key_segments is None:
        return attend_all()
    # One sum over the row serves all queries only if the row holds one document (and padding, in
    # any place); it takes half the time. Segments are data, so the choice is made at run time.
    document = key_segments.max(axis=1, keepdims=True)
    has_single_documents = jnp.all((key_segments == document) | (key_segments == 0))
    is_of_document = ((query_segments == document) & (document != 0))[:, :, None, None]
    return jax.lax.cond(
        has_single_documents,
        lambda: jnp.where(is_of_document, attend_all(), 0),
        lambda: _attend_sorted_by_document(q, k, v, feature_map, query_segments, key_segments),
    )


def _attend_sorted_by_document(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    feature_map: FeatureMap,
    query_segments: Int[Array, "#B T"],
    key_segments: Int[Array, "#B S"],
) -> Float[Array, "B T N Hv"]:
    """Sort tokens by document with keys before queries, then run a causal pass.

    In that order every query comes after all keys of its document, so it sees all of them.
    """
    batch, num_queries, num_keys = q.shape[0], q.shape[1], k.shape[1]
    query_segments = jnp.broadcast_to(query_segments, (batch, num_queries))
    key_segments = jnp.broadcast_to(key_segments, (batch, num_keys))
    segments = jnp.concatenate([key_segments, query_segments], axis=1)
    order = jnp.argsort(segments, axis=1, stable=True)  # stable: keys stay before queries

    def sort_padded(x: jax.Array, before: int, after: int) -> jax.Array:
        # Every row of the pass has a query and a key: zeros for what a token does not have.
        x = jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0)))
        return jnp.take_along_axis(x, order[:, :, None, None], axis=1)

    q = sort_padded(q, num_keys, 0)
    k, v = sort_padded(k, 0, num_queries), sort_padded(v, 0, num_queries)
    segments = jnp.take_along_axis(segments, order, axis=1)
    is_start = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    # Queries are not tokens of the pass: they read the sums and add nothing to them.
    is_key = (segments != 0) & (order < num_keys)
    y, _ = attend_causal(q, k, v, feature_map, DocumentBoundaries(is_start, is_key))
    inverse_order = jnp.argsort(order, axis=1)[:, num_keys:]
    return jnp.take_along_axis(y, inverse_order[:, :, None, None], axis=1)


def sum_keys(
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    feature_map: FeatureMap,
    segments: Int[Array, "#B S"] | None,  # 0 is padding; None: there is none
) -> LinearAttentionState:
    """Sum over all keys except padding, relative to the largest scale among them."""
    values, key_log_scale, _ = feature_map(k.astype(ACCUMULATION_DTYPE))
    if segments is not None:
        key_log_scale = jnp.where((segments != 0)[:, :, None], key_log_scale, -jnp.inf)
    log_scale = jax.lax.stop_gradient(key_log_scale.max(axis=1))
    scale = jnp.exp(key_log_scale - _finite_or_zero(log_scale)[:, None])
    kv_sums = jnp.einsum("BSKM,BSKH->BKMH", values * scale[..., None], _append_ones(v))
    return LinearAttentionState(kv_sums, log_scale)


def read_state(
    q: Float[Array, "B T N H"],
    feature_map: FeatureMap,
    state: LinearAttentionState,
) -> Float[Array, "B T N Hv"]:
    """Attend from queries to summed keys. Scales common to numerator and denominator cancel."""
    values, _, signed = feature_map(q.astype(ACCUMULATION_DTYPE))
    b, t, n, m = values.shape
    grouped = values.reshape(b, t, state.kv_sums.shape[1], -1, m)
    sums = jnp.einsum("BTKGM,BKMH->BTKGH", grouped, state.kv_sums)
    return _normalize(sums, signed).reshape(b, t, n, -1).astype(q.dtype)


def attend_causal(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    feature_map: FeatureMap,
    boundaries: DocumentBoundaries | None,
    state: LinearAttentionState | None = None,  # of previous tokens; None: no tokens
) -> tuple[Float[Array, "B T N Hv"], LinearAttentionState]:  # sums after the last token
    """Attend from each query to the keys of its document up to its own.

    The backward pass recomputes each chunk from its inputs and the state before it, so memory is
    T (M / `CHUNK_SIZE` + a few) H in both passes. Features exist for one chunk at a time.
    """
    batch, length, num_kv_heads, _ = k.shape
    if state is None:
        num_features = jax.eval_shape(feature_map, k).values.shape[-1]
        state = LinearAttentionState.empty(batch, num_kv_heads, num_features, v.shape[-1])
    chunking = Chunking.of(length)
    documents = chunking.split_documents(boundaries)
    chunks = _Chunk(
        q=chunking.split(q.reshape(batch, length, num_kv_heads, -1, q.shape[-1])),
        k=chunking.split(k),
        v=chunking.split(v),
        documents=documents,
    )
    # Recompute each chunk in the backward pass: its features and scores are not saved. Inside a
    # scan XLA cannot merge the recomputation with the forward pass, so no CSE has to be prevented.
    step = jax.checkpoint(functools.partial(_attend_chunk, feature_map), prevent_cse=False)
    final: LinearAttentionState
    first = jnp.zeros_like(documents.document[0, :, 0])
    (final, _), y = jax.lax.scan(step, (state, first), chunks)
    return chunking.join(y).reshape(*q.shape[:3], -1).astype(v.dtype), final


class _Chunk(NamedTuple):
    """Inputs of one chunk of C tokens. All chunks are stacked along a leading axis."""

    q: Float[Array, "B K G C H"]
    k: Float[Array, "B K C H"]
    v: Float[Array, "B K C Hv"]
    documents: ChunkDocuments


def _attend_chunk(
    feature_map: FeatureMap,
    carry: tuple[LinearAttentionState, jax.Array],  # sums, and number of their document [B or 1]
    chunk: _Chunk,
) -> tuple[tuple[LinearAttentionState, jax.Array], jax.Array]:  # [B, K, G, C, H of values]
    state, state_document = carry
    q = feature_map(chunk.q.astype(ACCUMULATION_DTYPE))
    k = feature_map(chunk.k.astype(ACCUMULATION_DTYPE))
    v = _append_ones(chunk.v)
    causal = jnp.tri(chunk.k.shape[2], dtype=bool)[None]
    document, key_document = chunk.documents
    visible = (document[:, :, None] == key_document[:, None, :]) & causal
    sees_state = document == state_document[:, None]
    # Scales are relative to the largest that each query sees (a running maximum). One maximum over
    # all keys, or over the chunk, would give the same quotient in exact arithmetic. But if it is
    # far larger than every scale a query sees, the query's sums underflow to zero, which depends on
    # future keys and breaks causality.
    key_scale = jnp.where(visible[:, None], k.log_scale[:, :, None, :], -jnp.inf)
    state_scale = jnp.where(sees_state[:, None], state.log_scale[:, :, None], -jnp.inf)
    log_scale = jax.lax.stop_gradient(jnp.maximum(key_scale.max(axis=-1), state_scale))
    finite = _finite_or_zero(log_scale)
    key_scale = jnp.exp(key_scale - finite[..., None])  # [B, K, C, C]
    state_scale = jnp.exp(state_scale - finite)  # [B, K, C]
    scores = jnp.einsum("BKGTM,BKSM->BKGTS", q.values, k.values) * key_scale[:, :, None]
    # Values carry a column of ones, so one matmul gives the numerator and the normalizer.
    sums = jnp.einsum("BKGTS,BKSH->BKGTH", scores, v)
    from_state = jnp.einsum("BKGTM,BKMH->BKGTH", q.values, state.kv_sums)
    sums = sums + from_state * state_scale[:, :, None, :, None]
    # The state after the chunk is what its last token sees: reuse that token's scales.
    added = jnp.einsum("BKSM,BKSH->BKMH", k.values * key_scale[:, :, -1, :, None], v)
    kv_sums = state.kv_sums * state_scale[:, :, -1, None, None] + added
    state = LinearAttentionState(kv_sums, log_scale[:, :, -1])
    return (state, document[:, -1]), _normalize(sums, q.signed)


def _append_ones(v: Float[Array, "... Hv"]) -> Float[Array, "... Hv_plus_1"]:
    """Append a column of ones, whose weighted sum is the sum of the weights."""
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1).astype(ACCUMULATION_DTYPE)


def _normalize(sums: Float[Array, "... H_plus_1"], signed: bool) -> Float[Array, "... H"]:
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


def _finite_or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)

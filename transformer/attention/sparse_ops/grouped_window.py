"""Attention within groups: each query attends to the last members of its group, itself included.

Tokens are sorted by group. Each group is cut into chunks, and a chunk attends to itself and to a
window before it. A chunk always starts at the start of its group or after a full chunk, and never
spans two groups. A token's place in its chunk then depends on earlier members only, so the same
keys are added in the same order whatever tokens come later. Chunks of fixed size over the sorted
row would break this: a later token would shift earlier ones to other places and change their last
digits, which violates bitwise causality.

Letters in shapes: R queries of a chunk, C keys of a chunk, F integers per token that a score bias
depends on.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from transformer.attention.backends.partial import PartialAttention
from transformer.attention.sparse_ops.query_blocks import softmax_where
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum

CHUNK_SIZE = 64
"""Number of queries per chunk."""


ScoreBiasFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(integers of queries [B, N, R, F], of keys [B, N, C, F]) -> score bias [B, N, R, C]."""


class _PassSettings(NamedTuple):
    """Static settings of a pass (hashable: `custom_vjp` requires it)."""

    window: int
    lookahead: int  # number of keys after the last query of a chunk
    chunk_size: int
    scale: float
    softmax_dtype: str
    operand_dtype: str
    score_bias_fn: ScoreBiasFn | None

    @property
    def sum_dtype(self) -> Any:
        """Accumulation dtype of the matmuls."""
        return accumulation_dtype(self.operand_dtype, self.softmax_dtype)


def attend_grouped(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N Hv"],
    groups: Int[Array, "B N T"],  # group of each token; -1: masked
    window: int,
    *,
    causal: bool,
    scale: float,
    softmax_dtype: str = "float32",
    operand_dtype: str = "",  # as in `ScoreSpec`; "": dtype of q
    score_bias_fn: ScoreBiasFn | None = None,
    bias_inputs: Int[Array, "B N T F"] | None = None,  # inputs of `score_bias_fn`
) -> PartialAttention:
    """Compute a softmax over the last `window` members of each query's group, itself included.

    Not causal: also over the window - 1 members after it. Memory is linear in T in both passes.
    Time is linear too, apart from the sort.
    """
    length = q.shape[1]
    settings = _PassSettings(
        window=window,
        lookahead=0 if causal else window,
        chunk_size=min(CHUNK_SIZE, length),
        scale=scale,
        softmax_dtype=softmax_dtype,
        operand_dtype=operand_dtype or q.dtype.name,
        score_bias_fn=score_bias_fn,
    )
    # A stable sort keeps the members of a group in the order of the row.
    order = jnp.argsort(groups, axis=-1, stable=True)
    # The argsort of a permutation is its inverse.
    inverse_order = jnp.argsort(order, axis=-1)
    sorted_qkv = [_gather(x.swapaxes(1, 2), order) for x in (q, k, v)]
    # The group and the inputs of the bias in one array: one gather, and one slice in each chunk.
    tags = groups[..., None]
    if bias_inputs is not None:
        tags = jnp.concatenate([tags, bias_inputs], -1)
    y, lse = _attend_sorted(settings, *sorted_qkv, _gather(tags, order))
    return PartialAttention(
        _gather(y, inverse_order).swapaxes(1, 2), _gather(lse[..., None], inverse_order)[..., 0]
    )


def group_positions(
    groups: Int[Array, "B N T"],
    window: int,
) -> Int[Array, "B N T"]:
    """Return numbers whose differences encode visibility.

    Two numbers differ by less than `window` exactly if their tokens are in the same group and less
    than `window` members apart.
    """
    # A stable sort keeps the members of a group in the order of the row.
    order = jnp.argsort(groups, axis=-1, stable=True)
    # Members of a group are consecutive in the sorted row; `window * groups` moves different groups
    # at least `window` apart.
    return jnp.argsort(order, axis=-1) + window * groups


def split_groups_by_document(
    groups: Int[Array, "B N T"],  # numbers below `num_groups`
    num_groups: int,
    documents: Int[Array, "#B T"] | None,  # 0 is padding; None: one document
) -> Int[Array, "B N T"]:
    """Return groups that are separate for each document. Padding gets group -1."""
    if documents is None:
        return groups
    segments = documents[:, None, :]
    return jnp.where(segments == 0, -1, segments * num_groups + groups)


def _gather(x: Shaped[Array, "B N T F"], index: Int[Array, "B N T"]) -> Shaped[Array, "B N T F"]:
    return jnp.take_along_axis(x, index[..., None], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_sorted(
    settings: _PassSettings,
    q: Float[Array, "B N T H"],  # sorted by group
    k: Float[Array, "B N T H"],
    v: Float[Array, "B N T Hv"],
    tags: Int[Array, "B N T tags"],  # the group, then the bias inputs
) -> PartialAttention:  # y [B, N, T, H of values]
    # The number of chunks depends on the data: at most T / chunk_size + the number of groups. The
    # loop bound is therefore a traced value and the backward pass is written by hand.
    starts, count = _chunk_starts(tags[..., 0], settings.chunk_size)
    padded = _pad(settings, q, k, v, tags)

    def add_chunk(chunk: jax.Array, result: PartialAttention) -> PartialAttention:
        start = starts[..., chunk]
        y, lse = _attend_chunk(settings, *_slice_chunk(settings, padded, start))
        # Rows after the end of the group are invalid. The first chunk of the next group starts
        # there and overwrites them, because chunks run in order of their start.
        return PartialAttention(
            _update_slice(result.y, y.astype(v.dtype), start), _update_slice(result.lse, lse, start)
        )

    batch, heads, length = q.shape[:3]
    # Room for a whole chunk after the last token, where a chunk may start. Rows with fewer chunks
    # than others write there as well: the start of a missing chunk is T.
    padded_shape = (batch, heads, length + settings.chunk_size)
    empty = PartialAttention(
        jnp.zeros((*padded_shape, v.shape[-1]), v.dtype),
        jnp.full(padded_shape, -jnp.inf, settings.softmax_dtype),
    )
    # In order of `starts`, on which the overwriting in `add_chunk` relies.
    y, lse = jax.lax.fori_loop(0, count, add_chunk, empty)
    return PartialAttention(y[:, :, :length], lse[:, :, :length])


Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Queries, keys, values and tags, or their gradients."""


def _forward(settings: _PassSettings, *residuals: jax.Array) -> tuple[PartialAttention, Any]:
    return _attend_sorted(settings, *residuals), residuals


def _backward(settings: _PassSettings, residuals: Arrays, cotangent: PartialAttention) -> Any:
    q, k, v, tags = residuals
    window, chunk_size, dtype = settings.window, settings.chunk_size, settings.sum_dtype
    starts, count = _chunk_starts(tags[..., 0], chunk_size)
    padded = _pad(settings, q, k, v, tags)
    # As long as the result of the forward pass: a chunk near the end, or a missing one, reads zeros
    # there.
    padding = [(0, 0), (0, 0), (0, chunk_size)]
    d_y, d_lse = jnp.pad(cotangent.y, [*padding, (0, 0)]), jnp.pad(cotangent.lse, padding)

    # Chunks overlap in their keys, so key gradients accumulate in padded arrays.
    def add_chunk(chunk: jax.Array, gradients: Any) -> Any:
        dq, dk, dv = gradients
        start = starts[..., chunk]
        chunk_q, chunk_k, chunk_v, q_tags, k_tags = _slice_chunk(settings, padded, start)

        # Weights [R, C] are computed again, chunk by chunk; JAX differentiates one chunk.
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> PartialAttention:
            return _attend_chunk(settings, q, k, v, q_tags, k_tags)

        _, chunk_vjp = jax.vjp(attend, *(x.astype(dtype) for x in (chunk_q, chunk_k, chunk_v)))
        # Rows after the end of the group belong to other groups: mask their cotangents.
        in_group = (q_tags[..., 0] == q_tags[..., :1, 0]) & (q_tags[..., 0] >= 0)
        chunk_dy = _slice(d_y, start, chunk_size).astype(dtype)
        chunk_cotangent = PartialAttention(
            jnp.where(in_group[..., None], chunk_dy, 0),
            jnp.where(in_group, _slice(d_lse, start, chunk_size), 0),
        )
        chunk_dq, chunk_dk, chunk_dv = chunk_vjp(chunk_cotangent)
        # In padded rows a chunk's keys begin at `start`, and its queries `window` later.
        return (
            _add_to_slice(dq, chunk_dq, start + window),
            _add_to_slice(dk, chunk_dk, start),
            _add_to_slice(dv, chunk_dv, start),
        )

    # In the wide dtype: a key gets terms from its own chunk and from later ones.
    zeros = tuple(jnp.zeros(x.shape, dtype) for x in padded[:3])
    dq, dk, dv = (
        x[:, :, window : window + q.shape[2]]  # without the padding of both sides
        for x in jax.lax.fori_loop(0, count, add_chunk, zeros)
    )
    # Tags are integers.
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend_sorted.defvjp(_forward, _backward)


def _pad(
    settings: _PassSettings, q: jax.Array, k: jax.Array, v: jax.Array, tags: jax.Array
) -> Arrays:
    """Pad sorted arrays, so that the windows of the first and last chunks are in bounds."""
    after = settings.chunk_size + settings.lookahead
    padding = [(0, 0), (0, 0), (settings.window, after), (0, 0)]
    # Group -1 is not a group: nothing sees padding.
    tags = jnp.pad(tags, padding, constant_values=-1)
    return jnp.pad(q, padding), jnp.pad(k, padding), jnp.pad(v, padding), tags


def _slice_chunk(
    settings: _PassSettings,
    padded: Arrays,
    start: Int[Array, "B N"],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:  # [B, N, R or C, ...]
    """Return the queries, keys and values of a chunk, and the tags of the queries and keys."""
    q, k, v, tags = padded
    first_query, num_queries = start + settings.window, settings.chunk_size
    num_keys = settings.window + settings.chunk_size + settings.lookahead
    return (
        _slice(q, first_query, num_queries),
        _slice(k, start, num_keys),
        _slice(v, start, num_keys),
        _slice(tags, first_query, num_queries),
        _slice(tags, start, num_keys),
    )


def _attend_chunk(
    settings: _PassSettings,
    q: Float[Array, "B N R H"],
    k: Float[Array, "B N C H"],
    v: Float[Array, "B N C Hv"],
    q_tags: Int[Array, "B N R F_plus_1"],
    k_tags: Int[Array, "B N C F_plus_1"],
) -> PartialAttention:  # y [B, N, R, H of values], not rounded
    """Attend within one chunk. Key column `window` is the first query's own key."""
    scores = precise_einsum("BNRH,BNCH->BNRC", q, k, settings.operand_dtype, settings.sum_dtype)
    scores = scores.astype(settings.softmax_dtype) * settings.scale
    if settings.score_bias_fn is not None:
        bias = settings.score_bias_fn(q_tags[..., 1:], k_tags[..., 1:])
        scores = scores + bias.astype(scores.dtype)
    # Row r is key column window + r, so this is the distance in members (positive: key before).
    distance = settings.window + jnp.arange(q.shape[2])[:, None] - jnp.arange(k.shape[2])[None, :]
    in_window = (distance < settings.window) & (
        distance > (-settings.window if settings.lookahead else -1)
    )
    query_groups = q_tags[..., :1]
    visible = (
        in_window[None, None] & (query_groups == k_tags[..., 0][..., None, :]) & (query_groups >= 0)
    )
    # `>= 0` hides masked tokens (group -1), which would otherwise form a group of their own.
    weights, lse = softmax_where(scores, visible)
    weights = weights.astype(settings.sum_dtype)
    return PartialAttention(
        precise_einsum("BNRC,BNCH->BNRH", weights, v, settings.operand_dtype, settings.sum_dtype),
        lse,
    )


def _chunk_starts(
    groups: Int[Array, "B N T"],  # sorted
    size: int,
) -> tuple[Int[Array, "B N T"], Int[Array, ""]]:
    """Return the sorted start of each chunk (T: none) and the largest number of chunks in a row."""
    length = groups.shape[2]
    index = jnp.arange(length)[None, None, :]
    is_group_start = jnp.pad(
        groups[..., 1:] != groups[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True
    )
    # The number of earlier members: the distance to the newest start of a group.
    member_index = index - jax.lax.cummax(jnp.where(is_group_start, index, 0), axis=2)
    # A chunk starts at every `size`-th member of a group.
    is_chunk_start = (member_index % size == 0) & (groups >= 0)
    # Sorting moves the starts to the front, in the order of the row, and T behind them.
    return jnp.sort(jnp.where(is_chunk_start, index, length), axis=-1), is_chunk_start.sum(-1).max()


def _slice(
    x: Shaped[Array, "B N T ..."], start: Int[Array, "B N"], size: int
) -> Shaped[Array, "B N size ..."]:
    def slice_row(row: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, start, size)

    # Each row and head has a start of its own: under `vmap` the slice becomes a gather.
    return jax.vmap(jax.vmap(slice_row))(x, start)


def _update_slice(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    def update_row(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, 0)

    return jax.vmap(jax.vmap(update_row))(x, new, start)


def _add_to_slice(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    # Read, add, write: within one chunk all rows differ, so a scatter-add is not needed. The
    # padding keeps `start` in bounds, where both slices would be moved.
    return _update_slice(x, _slice(x, start, new.shape[2]) + new.astype(x.dtype), start)

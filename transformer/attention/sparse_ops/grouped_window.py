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

from transformer.attention.backends.tiling import PartialAttention
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
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, N, H]
    v: jax.Array,  # [B, T, N, H of values]
    groups: jax.Array,  # [B, N, T] group of each token; -1: masked
    window: int,
    *,
    causal: bool,
    scale: float,
    softmax_dtype: str = "float32",
    operand_dtype: str = "",  # as in `ScoreSpec`; "": dtype of q
    score_bias_fn: ScoreBiasFn | None = None,
    bias_inputs: jax.Array | None = None,  # [B, N, T, F] inputs of `score_bias_fn`
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
    sorted_qkv = [_gather(each.swapaxes(1, 2), order) for each in (q, k, v)]
    # The group and the inputs of the bias in one array: one gather, and one slice in each chunk.
    tags = (
        groups[..., None]
        if bias_inputs is None
        else jnp.concatenate([groups[..., None], bias_inputs], -1)
    )
    result = _attend_sorted(settings, *sorted_qkv, _gather(tags, order))
    return PartialAttention(
        _gather(result.y, inverse_order).swapaxes(1, 2),
        _gather(result.lse[..., None], inverse_order)[..., 0],
    )


def group_positions(
    groups: jax.Array,  # [B, N, T]
    window: int,
) -> jax.Array:  # [B, N, T]
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
    groups: jax.Array,  # [B, N, T] numbers below `num_groups`
    num_groups: int,
    documents: jax.Array | None,  # [B or 1, T] 0 is padding; None: one document
) -> jax.Array:  # [B, N, T]
    """Return groups that are separate for each document. Padding gets group -1."""
    if documents is None:
        return groups
    segments = documents[:, None, :]
    return jnp.where(segments == 0, -1, segments * num_groups + groups)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:  # [B, N, T, F], [B, N, T]
    return jnp.take_along_axis(x, index[..., None], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_sorted(
    settings: _PassSettings,
    q: jax.Array,  # [B, N, T, H] sorted by group
    k: jax.Array,  # [B, N, T, H]
    v: jax.Array,  # [B, N, T, H of values]
    tags: jax.Array,  # [B, N, T, 1 + F] the group, then the bias inputs
) -> PartialAttention:  # y [B, N, T, H of values]
    # The number of chunks depends on the data: at most T / chunk_size + the number of groups. The
    # loop bound is therefore a traced value and the backward pass is written by hand.
    starts, count = _chunk_starts(tags[..., 0], settings.chunk_size)
    padded = _PaddedTokens(settings, q, k, v, tags)

    def body(chunk: Any, result: PartialAttention) -> PartialAttention:
        start = starts[..., chunk]
        y, lse = _attend_chunk(settings, *padded.arrays(start), *padded.tags_of(start))
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
    # In order of `starts`, on which the overwriting in `body` relies.
    result = jax.lax.fori_loop(0, count, body, empty)
    return PartialAttention(result.y[:, :, :length], result.lse[:, :, :length])


def _forward(settings: _PassSettings, q: Any, k: Any, v: Any, tags: Any) -> Any:
    return _attend_sorted(settings, q, k, v, tags), (q, k, v, tags)


def _backward(settings: _PassSettings, residuals: Any, cotangent: PartialAttention) -> Any:
    q, k, v, tags = residuals
    starts, count = _chunk_starts(tags[..., 0], settings.chunk_size)
    padded = _PaddedTokens(settings, q, k, v, tags)
    # As long as the result of the forward pass: a chunk near the end, or a missing one, reads zeros
    # there.
    padding = [(0, 0), (0, 0), (0, settings.chunk_size)]
    d_y, d_lse = jnp.pad(cotangent.y, [*padding, (0, 0)]), jnp.pad(cotangent.lse, padding)

    # Chunks overlap in their keys, so key gradients accumulate in padded arrays.
    def body(chunk: Any, padded_grads: Any) -> Any:
        start = starts[..., chunk]
        tags_q, tags_k = padded.tags_of(start)
        # Weights [R, C] are computed again, chunk by chunk; JAX differentiates one chunk.
        attend_chunk = lambda q, k, v: _attend_chunk(settings, q, k, v, tags_q, tags_k)  # noqa: E731
        _, chunk_vjp = jax.vjp(
            attend_chunk, *(each.astype(settings.sum_dtype) for each in padded.arrays(start))
        )
        # Rows after the end of the group belong to other groups: mask their cotangents.
        in_group = (tags_q[..., 0] == tags_q[..., :1, 0]) & (tags_q[..., 0] >= 0)
        chunk_cotangent = (
            _slice(d_y, start, settings.chunk_size).astype(settings.sum_dtype),
            _slice(d_lse, start, settings.chunk_size),
        )
        chunk_grads = chunk_vjp(
            PartialAttention(
                jnp.where(in_group[..., None], chunk_cotangent[0], 0),
                jnp.where(in_group, chunk_cotangent[1], 0),
            )
        )
        # In padded rows a chunk's keys begin at `start`, and its queries `window` later.
        starts_qkv = (start + settings.window, start, start)
        return tuple(map(_add_to_slice, padded_grads, chunk_grads, starts_qkv))

    zeros = lambda x: jnp.zeros(x.shape, settings.sum_dtype)  # noqa: E731
    # In the wide dtype: a key gets terms from its own chunk and from later ones.
    padded_grads = jax.lax.fori_loop(
        0, count, body, tuple(map(zeros, (padded.q, padded.k, padded.v)))
    )
    # Cut off the padding that `_PaddedTokens` added on both sides.
    unpadded = slice(settings.window, settings.window + q.shape[2])
    grads = (
        x[:, :, unpadded].astype(primal.dtype)
        for x, primal in zip(padded_grads, (q, k, v), strict=True)
    )
    # Tags are integers.
    return (*grads, None)


_attend_sorted.defvjp(_forward, _backward)


class _PaddedTokens:
    """Sorted arrays, padded so that the windows of the first and last chunks are in bounds."""

    def __init__(
        self, settings: _PassSettings, q: jax.Array, k: jax.Array, v: jax.Array, tags: jax.Array
    ):
        padding = [
            (0, 0),
            (0, 0),
            (settings.window, settings.chunk_size + settings.lookahead),
            (0, 0),
        ]
        self.q, self.k, self.v = (jnp.pad(each, padding) for each in (q, k, v))
        # Group -1 is not a group: nothing sees padding.
        self.tags = jnp.pad(tags, padding, constant_values=-1)
        self.behind, self.rows = settings.window, settings.chunk_size
        self.columns = settings.window + settings.chunk_size + settings.lookahead

    def arrays(
        self, start: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N] -> [B, N, R or C, H]
        """Return the queries, keys and values of a chunk."""
        k, v = (_slice(each, start, self.columns) for each in (self.k, self.v))
        return _slice(self.q, start + self.behind, self.rows), k, v

    def tags_of(self, start: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B, N, R or C, 1 + F]
        """Return the tags of the queries and of the keys of a chunk."""
        return _slice(self.tags, start + self.behind, self.rows), _slice(
            self.tags, start, self.columns
        )


def _attend_chunk(
    settings: _PassSettings,
    q: jax.Array,  # [B, N, R, H]
    k: jax.Array,  # [B, N, C, H]
    v: jax.Array,  # [B, N, C, H of values]
    tags_q: jax.Array,  # [B, N, R, 1 + F]
    tags_k: jax.Array,  # [B, N, C, 1 + F]
) -> PartialAttention:  # y [B, N, R, H of values], not rounded
    """Attend within one chunk. Key column `window` is the first query's own key."""
    scores = precise_einsum("BNRH,BNCH->BNRC", q, k, settings.operand_dtype, settings.sum_dtype)
    scores = scores.astype(settings.softmax_dtype) * settings.scale
    if settings.score_bias_fn is not None:
        bias = settings.score_bias_fn(tags_q[..., 1:], tags_k[..., 1:])
        scores = scores + bias.astype(scores.dtype)
    # Row r is key column window + r, so this is the distance in members (positive: key before).
    distance = settings.window + jnp.arange(q.shape[2])[:, None] - jnp.arange(k.shape[2])[None, :]
    in_window = (distance < settings.window) & (
        distance > (-settings.window if settings.lookahead else -1)
    )
    query_groups = tags_q[..., :1]
    visible = (
        in_window[None, None] & (query_groups == tags_k[..., 0][..., None, :]) & (query_groups >= 0)
    )
    # `>= 0` hides masked tokens (group -1), which would otherwise form a group of their own.
    weights, lse = softmax_where(scores, visible)
    weights = weights.astype(settings.sum_dtype)
    return PartialAttention(
        precise_einsum("BNRC,BNCH->BNRH", weights, v, settings.operand_dtype, settings.sum_dtype),
        lse,
    )


def _chunk_starts(
    groups: jax.Array,  # [B, N, T] sorted
    size: int,
) -> tuple[jax.Array, jax.Array]:  # [B, N, T], a number
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


def _slice(x: jax.Array, start: jax.Array, size: int) -> jax.Array:  # [B, N, T, ...], [B, N]
    # Each row and head has a start of its own: under `vmap` the slice becomes a gather.
    one = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size)  # noqa: E731
    return jax.vmap(jax.vmap(one))(x, start)


def _update_slice(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    one = lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(jax.vmap(one))(x, new, start)


def _add_to_slice(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    # Read, add, write: within one chunk all rows differ, so a scatter-add is not needed. The
    # padding keeps `start` in bounds, where both slices would be moved.
    return _update_slice(x, _slice(x, start, new.shape[2]) + new.astype(x.dtype), start)

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

from transformer.attention.backends.blockwise import PartialAttention
from transformer.attention.sparse_ops.top_k_keys import softmax_where
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum

CHUNK_SIZE = 64
"""Number of queries per chunk."""


ScoreBiasFn = Callable[[jax.Array, jax.Array], jax.Array]
"""(integers of queries [B, N, R, F], of keys [B, N, C, F]) -> score bias [B, N, R, C]."""


class _How(NamedTuple):
    """Static settings of a pass (hashable: `custom_vjp` requires it)."""

    window: int
    ahead: int  # keys behind a chunk's last query that it looks at
    chunk: int
    scale: float
    softmax_dtype: str
    operands: str
    gain: ScoreBiasFn | None

    @property
    def sums(self) -> Any:
        """Accumulation dtype of the matmuls."""
        return accumulation_dtype(self.operands, self.softmax_dtype)


def attend_grouped(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, N, H]
    v: jax.Array,  # [B, T, N, H of values]
    groups: jax.Array,  # [B, N, T] each token's group; -1: it sees nothing and is not seen
    window: int,
    *,
    causal: bool,
    scale: float,
    softmax_dtype: str = "float32",
    operand_dtype: str = "",  # as `Scoring.operands`
    score_bias_fn: ScoreBiasFn | None = None,
    bias_inputs: jax.Array | None = None,  # [B, N, T, F] integers that `gain` goes by
) -> PartialAttention:
    """Compute a softmax over the last `window` members of each query's group, itself included.

    Not causal: also over the window - 1 members after it. Memory is linear in T in both passes.
    Time is linear too, apart from the sort.
    """
    length = q.shape[1]
    how = _How(
        window=window,
        ahead=0 if causal else window,
        chunk=min(CHUNK_SIZE, length),
        scale=scale,
        softmax_dtype=softmax_dtype,
        operands=operand_dtype or q.dtype.name,
        gain=score_bias_fn,
    )
    order = jnp.argsort(groups, axis=-1, stable=True)
    back = jnp.argsort(order, axis=-1)
    rows = [_picked(each.swapaxes(1, 2), order) for each in (q, k, v)]
    tags = (
        groups[..., None]
        if bias_inputs is None
        else jnp.concatenate([groups[..., None], bias_inputs], -1)
    )
    found = _grouped(how, *rows, _picked(tags, order))
    return PartialAttention(
        _picked(found.y, back).swapaxes(1, 2), _picked(found.lse[..., None], back)[..., 0]
    )


def group_positions(
    groups: jax.Array,  # [B, N, T]
    window: int,
) -> jax.Array:  # [B, N, T]
    """Return numbers whose differences encode visibility.

    Two numbers differ by less than `window` exactly if their tokens are in the same group and less
    than `window` members apart.
    """
    order = jnp.argsort(groups, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1) + window * groups


def split_groups_by_document(
    groups: jax.Array,  # [B, N, T] numbers below `count`
    num_groups: int,
    documents: jax.Array | None,  # [B or 1, T] 0 is padding; None: one document
) -> jax.Array:  # [B, N, T]
    """Return groups that are separate for each document. Padding gets group -1."""
    if documents is None:
        return groups
    here = documents[:, None, :]
    return jnp.where(here == 0, -1, here * num_groups + groups)


def _picked(x: jax.Array, index: jax.Array) -> jax.Array:  # [B, N, T, F], [B, N, T]
    return jnp.take_along_axis(x, index[..., None], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    how: _How,
    q: jax.Array,  # [B, N, T, H] sorted by group
    k: jax.Array,  # [B, N, T, H]
    v: jax.Array,  # [B, N, T, H of values]
    tags: jax.Array,  # [B, N, T, 1 + F] the group, then marks
) -> PartialAttention:  # y [B, N, T, H of values]
    starts, count = _chunks(tags[..., 0], how.chunk)
    cut = _Cut(how, q, k, v, tags)

    def body(chunk: Any, found: PartialAttention) -> PartialAttention:
        start = starts[..., chunk]
        y, lse = _look(how, *cut.arrays(start), *cut.tags_of(start))
        # Rows behind the end of the group are overwritten by the next one's first chunk.
        return PartialAttention(
            _put(found.y, y.astype(v.dtype), start), _put(found.lse, lse, start)
        )

    batch, heads, length = q.shape[:3]
    room = (batch, heads, length + how.chunk)
    empty = PartialAttention(
        jnp.zeros((*room, v.shape[-1]), v.dtype), jnp.full(room, -jnp.inf, how.softmax_dtype)
    )
    found = jax.lax.fori_loop(0, count, body, empty)
    return PartialAttention(found.y[:, :, :length], found.lse[:, :, :length])


def _forward(how: _How, q: Any, k: Any, v: Any, tags: Any) -> Any:
    return _grouped(how, q, k, v, tags), (q, k, v, tags)


def _backward(how: _How, kept: Any, cotangent: PartialAttention) -> Any:
    q, k, v, tags = kept
    starts, count = _chunks(tags[..., 0], how.chunk)
    cut = _Cut(how, q, k, v, tags)
    room = [(0, 0), (0, 0), (0, how.chunk)]
    d_y, d_lse = jnp.pad(cotangent.y, [*room, (0, 0)]), jnp.pad(cotangent.lse, room)

    def body(chunk: Any, sums: Any) -> Any:
        start = starts[..., chunk]
        tags_q, tags_k = cut.tags_of(start)
        look = lambda q, k, v: _look(how, q, k, v, tags_q, tags_k)  # noqa: E731
        _, pull = jax.vjp(look, *(each.astype(how.sums) for each in cut.arrays(start)))
        own = (tags_q[..., 0] == tags_q[..., :1, 0]) & (tags_q[..., 0] >= 0)
        here = _take(d_y, start, how.chunk).astype(how.sums), _take(d_lse, start, how.chunk)
        found = pull(
            PartialAttention(jnp.where(own[..., None], here[0], 0), jnp.where(own, here[1], 0))
        )
        at = (start + how.window, start, start)
        return tuple(map(_add, sums, found, at))

    zeros = lambda x: jnp.zeros(x.shape, how.sums)  # noqa: E731
    sums = jax.lax.fori_loop(0, count, body, tuple(map(zeros, (cut.q, cut.k, cut.v))))
    real = slice(how.window, how.window + q.shape[2])
    grads = (x[:, :, real].astype(like.dtype) for x, like in zip(sums, (q, k, v), strict=True))
    return (*grads, None)


_grouped.defvjp(_forward, _backward)


class _Cut:
    """Sorted arrays, padded so that the windows of the first and last chunks are in bounds."""

    def __init__(self, how: _How, q: jax.Array, k: jax.Array, v: jax.Array, tags: jax.Array):
        room = [(0, 0), (0, 0), (how.window, how.chunk + how.ahead), (0, 0)]
        self.q, self.k, self.v = (jnp.pad(each, room) for each in (q, k, v))
        self.tags = jnp.pad(tags, room, constant_values=-1)
        self.behind, self.rows = how.window, how.chunk
        self.columns = how.window + how.chunk + how.ahead

    def arrays(
        self, start: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, N] -> [B, N, R or C, H]
        """Return the queries, keys and values of a chunk."""
        k, v = (_take(each, start, self.columns) for each in (self.k, self.v))
        return _take(self.q, start + self.behind, self.rows), k, v

    def tags_of(self, start: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B, N, R or C, 1 + F]
        """Return the tags of the queries and of the keys of a chunk."""
        return _take(self.tags, start + self.behind, self.rows), _take(
            self.tags, start, self.columns
        )


def _look(
    how: _How,
    q: jax.Array,  # [B, N, R, H]
    k: jax.Array,  # [B, N, C, H]
    v: jax.Array,  # [B, N, C, H of values]
    tags_q: jax.Array,  # [B, N, R, 1 + F]
    tags_k: jax.Array,  # [B, N, C, 1 + F]
) -> PartialAttention:  # y [B, N, R, H of values], not rounded
    """Attend within one chunk. Key column `window` is the first query's own key."""
    scores = precise_einsum("BNRH,BNCH->BNRC", q, k, how.operands, how.sums)
    scores = scores.astype(how.softmax_dtype) * how.scale
    if how.gain is not None:
        gained = how.gain(tags_q[..., 1:], tags_k[..., 1:])
        scores = scores + gained.astype(scores.dtype)
    back = how.window + jnp.arange(q.shape[2])[:, None] - jnp.arange(k.shape[2])[None, :]
    near = (back < how.window) & (back > (-how.window if how.ahead else -1))
    theirs = tags_q[..., :1]
    seen = near[None, None] & (theirs == tags_k[..., 0][..., None, :]) & (theirs >= 0)
    weights, lse = softmax_where(scores, seen)
    weights = weights.astype(how.sums)
    return PartialAttention(
        precise_einsum("BNRC,BNCH->BNRH", weights, v, how.operands, how.sums), lse
    )


def _chunks(
    groups: jax.Array,  # [B, N, T] sorted
    size: int,
) -> tuple[jax.Array, jax.Array]:  # [B, N, T], a number
    """Return the sorted start of each chunk (T: none) and the largest number of chunks in a row."""
    length = groups.shape[2]
    index = jnp.arange(length)[None, None, :]
    first = jnp.pad(
        groups[..., 1:] != groups[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True
    )
    member = index - jax.lax.cummax(jnp.where(first, index, 0), axis=2)
    begins = (member % size == 0) & (groups >= 0)
    return jnp.sort(jnp.where(begins, index, length), axis=-1), begins.sum(-1).max()


def _take(x: jax.Array, start: jax.Array, size: int) -> jax.Array:  # [B, N, T, ...], [B, N]
    one = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size)  # noqa: E731
    return jax.vmap(jax.vmap(one))(x, start)


def _put(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    one = lambda row, part, at: jax.lax.dynamic_update_slice_in_dim(row, part, at, 0)  # noqa: E731
    return jax.vmap(jax.vmap(one))(x, new, start)


def _add(x: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return _put(x, _take(x, start, new.shape[2]) + new.astype(x.dtype), start)

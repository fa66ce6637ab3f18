"""The two patterns of Sparse Transformers, each in a local and a far part (Child et al. 2019).

Distances and blocks go by positions, which begin anew in every document. The far part is reached by
gathering: of the strided pattern, tokens of one residue modulo the stride become a sequence of
their own; of the fixed one, the summary tokens of all blocks become a short list of keys.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.attend import PartialAttention, ScoreSpec, attend_blockwise
from transformer.masks import Mask, MaskPattern
from transformer.variants.configs import Factorization as Factorization
from transformer.variants.configs import SparsePattern as SparsePattern

AttendFn = Callable[[jax.Array, jax.Array, jax.Array, ScoreSpec], PartialAttention]


def pattern_mask(
    pattern: SparsePattern,
    stride: int,
    num_summary_tokens: int,
    component: Factorization,
    query_positions: jax.Array,  # [B or 1, T] positions
    key_positions: jax.Array,  # [B or 1, S] positions
) -> jax.Array:  # [B or 1, T, S] booleans
    """Which keys a part sees, before any mask (equations 3 and 4)."""
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    if pattern == "strided":
        near, distant = jnp.abs(q - k) <= stride, (q - k) % stride == 0
    else:
        near = q // stride == k // stride
        distant = jnp.broadcast_to(_is_summary(k, stride, num_summary_tokens), near.shape)
    return {"local": near, "far": distant, "merged": near | distant}[component]


def local_mask(pattern: SparsePattern, stride: int, mask: Mask, length: int) -> Mask:
    """The mask of the local part: a window, of the fixed pattern within blocks."""
    if pattern == "strided":
        return _with(mask, window=stride + 1)
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    block = mask.resolved_positions(length, length)[0] // stride
    # Each block of each document is a segment of its own.
    own = jnp.where(segments == 0, 0, 1 + segments * (length // stride + 2) + block)
    return _with(mask, window=stride).replace(segments=own)


def far_attention(
    pattern: SparsePattern, stride: int, num_summary_tokens: int, mask: Mask, *, exclude_local: bool
) -> list[AttendFn]:
    """How the far part is looked at, in one piece or, behind and ahead, in two.

    `exclude_local` leaves out what the local part sees.
    """
    directions = [1] if mask.pattern.causal else [1, -1]
    if not exclude_local and not mask.pattern.causal:
        directions = [0]

    def one(direction: int) -> AttendFn:
        def look(q: jax.Array, k: jax.Array, v: jax.Array, scoring: ScoreSpec) -> PartialAttention:
            if pattern == "strided":
                return _columns(stride, direction, exclude_local, mask, q, k, v, scoring)
            return _summaries(
                stride, num_summary_tokens, direction, exclude_local, mask, q, k, v, scoring
            )

        return look

    return [one(direction) for direction in directions]


def _columns(
    stride: int,
    direction: int,  # 1: keys behind, -1: keys ahead, 0: both
    apart: bool,
    mask: Mask,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    scoring: ScoreSpec,
) -> PartialAttention:
    """Tokens at distances that are multiples of the stride, as rows of T / stride tokens."""
    batch, length = q.shape[:2]
    rows = -(-length // stride)

    def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B stride, rows, ...]
        width = [(0, 0)] * x.ndim
        width[1] = (0, rows * stride - length)
        x = jnp.pad(x, width).reshape(x.shape[0], rows, stride, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(-1, rows, *x.shape[3:])

    segments = _documents(mask, batch, length)
    index = jnp.arange(rows)[None, :]
    least = 2 if apart else 0  # in strides: what is nearer is in the local part
    within = Mask(
        MaskPattern(causal=direction != 0),
        positions=direction * index - least if direction else index,
        segments=split(segments),
    )
    within = within.replace(key_positions=direction * index if direction else index)
    y, lse = attend_blockwise(split(q), split(k), split(v), within, scoring)

    def unsplit(x: jax.Array) -> jax.Array:  # [B stride, rows, ...] -> [B, T, ...]
        x = x.reshape(batch, stride, rows, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(batch, rows * stride, *x.shape[3:])[:, :length]

    return PartialAttention(unsplit(y), unsplit(lse.swapaxes(1, 2)).swapaxes(1, 2))


def _summaries(
    stride: int,
    summary: int,
    direction: int,  # 1: keys behind, -1: keys ahead, 0: both
    apart: bool,
    mask: Mask,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    scoring: ScoreSpec,
) -> PartialAttention:
    """The last tokens of all blocks, gathered.

    Of T tokens in documents that begin at position 0 they are never more than T summary / stride.
    One document of a row may begin elsewhere, as where a long one was cut: then the row can begin
    and end among the last tokens of a block, which makes summary (stride - summary) / stride more.
    """
    batch, length = q.shape[:2]
    positions = jnp.broadcast_to(mask.resolved_positions(length, length)[0], (batch, length))
    segments = _documents(mask, batch, length)
    is_summary = _is_summary(positions, stride, summary) & (segments != 0)
    count = min(length, summary * (length + stride - summary) // stride)
    chosen = jnp.argsort(~is_summary, axis=1, stable=True)[:, :count]  # [B, count]
    k, v = (jnp.take_along_axis(each, chosen[:, :, None, None], axis=1) for each in (k, v))
    pick = lambda x: jnp.take_along_axis(x, chosen, axis=1)  # noqa: E731
    theirs = pick(positions)
    seen = Mask(
        segments=segments,
        key_segments=jnp.where(pick(is_summary), pick(segments), 0),
        positions=positions,
        key_positions=theirs,
    )
    if apart:
        own, other = positions // stride, theirs // stride
        seen = seen.replace(
            pattern=MaskPattern(causal=True),
            positions=direction * own - 1,
            key_positions=direction * other,
        )
    elif direction:
        seen = seen.replace(pattern=MaskPattern(causal=True))
    return attend_blockwise(q, k, v, seen, scoring)


def _documents(mask: Mask, batch: int, length: int) -> jax.Array:  # [B, T]
    """Segments, with 0 where the mask says that no token is."""
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    if mask.key_lengths is not None:
        segments = segments * (jnp.arange(length)[None, :] < mask.key_lengths[:, None])
    return jnp.broadcast_to(segments, (batch, length))


def _is_summary(positions: jax.Array, stride: int, summary: int) -> jax.Array:
    return positions % stride >= stride - summary


def _with(mask: Mask, *, window: int) -> Mask:
    return mask.replace(pattern=dataclasses.replace(mask.pattern, window=window))

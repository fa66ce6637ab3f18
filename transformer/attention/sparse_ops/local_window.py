"""Local windows: attention with a dilation per head, and windows of neighboring tokens.

- `attend_dilated`: two-sided sliding window (Beltagy et al. 2020, section 3.1).
- `neighbor_window`: the inputs of convolutions over the tokens of a document.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.attention.backends.blockwise import DEFAULT_BLOCK_SIZE, attend_blockwise
from transformer.attention.backends.tiling import PartialAttention
from transformer.attention.document_boundaries import token_segments
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.layers.basic import fold_in

MIN_TILE_SIZE = 64


def attend_dilated(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,  # causal or not; with positions, segments and key_segments
    score_spec: ScoreSpec,
    one_sided_window: int,  # keys on each side, beside the query's own
    dilations: Sequence[int],  # of each head, or one for all
    max_tile_size: int = DEFAULT_BLOCK_SIZE,  # the most queries, and keys, that are scored at once
) -> PartialAttention:
    """Attend to keys 0, d, 2 d, ..., window * d positions away (causal: to those before).

    Positions must count up by one within a document. Cost O(T window) for any dilation. Keys with
    `key_positions` of their own, such as cached keys, may be in any order at a cost of O(T S).
    """
    if len(set(dilations)) == 1:
        return _dilated(q, k, v, mask, score_spec, one_sided_window, dilations[0], max_tile_size)
    # Group heads by dilation, then restore their order. Grouped-query heads with different
    # dilations cannot share a call, so key heads are repeated here.
    # One call for each dilation, since a call has one row layout for all of its heads.
    head_dilations, heads_per_kv_head = np.array(dilations), q.shape[2] // k.shape[2]
    partials, head_order = [], []
    for dilation in sorted(set(dilations)):
        heads = np.flatnonzero(head_dilations == dilation)
        head_qkv = (
            q[:, :, heads],
            k[:, :, heads // heads_per_kv_head],
            v[:, :, heads // heads_per_kv_head],
        )
        # Another key for each call: with the same one, all would drop the same weights.
        head_spec = score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, dilation))
        partials.append(
            _dilated(*head_qkv, mask, head_spec, one_sided_window, dilation, max_tile_size)
        )
        head_order += list(heads)
    # In NumPy: dilations are static, so the order of the heads is a constant of the program.
    inverse_order = np.argsort(head_order)
    y = jnp.concatenate([part.y for part in partials], axis=2)[:, :, inverse_order]
    return PartialAttention(
        y, jnp.concatenate([part.lse for part in partials], axis=1)[:, inverse_order]
    )


def _dilated(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    score_spec: ScoreSpec,
    window: int,
    dilation: int,
    max_tile_size: int,
) -> PartialAttention:
    """Attend with the same dilation d in all heads.

    Reshape each row into d rows that hold every d-th token. The window has no gaps in them, so that
    the blockwise kernel skips everything outside it.
    """
    batch, length = q.shape[:2]
    # Tiles as wide as the window compute two or three for each block of queries. Much smaller
    # ones would spend their time in the loop and not in products.
    block = min(max(window, MIN_TILE_SIZE), max_tile_size)
    # Keys less than `window + 1` positions away: the query's own, and `window` on a side.
    pattern = MaskPattern(causal=mask.pattern.causal, window=window + 1)
    # Cached keys: order and gaps are unknown, so only positions decide (no tiles are skipped).
    if mask.key_positions is not None:
        pattern = dataclasses.replace(pattern, dilation=dilation, ordered=False)
        return attend_blockwise(q, k, v, mask.replace(pattern=pattern), score_spec)
    if dilation == 1:
        return attend_blockwise(
            q, k, v, mask.replace(pattern=pattern), score_spec, block_size=block
        )

    # d times the rows with a d-th of the tokens: any dilation costs what a dilation of 1 does.
    def split_rows(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B d, T / d, ...]
        padding = [(0, 0)] * x.ndim
        # Zeros: padding tokens get segment 0, which hides them.
        padding[1] = (0, -length % dilation)
        cut = jnp.pad(x, padding).reshape(batch, -1, dilation, *x.shape[2:])
        return cut.swapaxes(1, 2).reshape(batch * dilation, -1, *x.shape[2:])

    def split_token_rows(x: Any) -> jax.Array:  # [B or 1, T] -> [B d, T / d]
        return split_rows(jnp.broadcast_to(x, (batch, length)))

    def merge_rows(x: jax.Array) -> jax.Array:  # [B d, T / d, ...] -> [B, T, ...]
        cut = x.reshape(batch, dilation, *x.shape[1:]).swapaxes(1, 2)
        return cut.reshape(batch, -1, *x.shape[2:])[:, :length]

    # Each of the d rows of an example needs its own dropout key.
    dropout_rngs = score_spec.dropout_rngs
    if dropout_rngs is not None:
        dropout_rngs = jax.vmap(lambda key: jax.random.split(key, dilation))(dropout_rngs).reshape(
            -1
        )
    # In a row, positions are d apart; integer division makes them consecutive.
    row_mask = Mask(
        pattern,
        positions=split_token_rows(mask.positions) // dilation,
        segments=split_token_rows(mask.segments),
        key_segments=split_token_rows(mask.key_segments),
    )
    partial = attend_blockwise(
        split_rows(q),
        split_rows(k),
        split_rows(v),
        row_mask,
        score_spec._replace(dropout_rngs=dropout_rngs),
        block_size=block,
    )
    return PartialAttention(
        merge_rows(partial.y), merge_rows(partial.lse.swapaxes(1, 2)).swapaxes(1, 2)
    )


class NeighborCache(struct.PyTreeNode):
    """Inputs of a causal convolution at the last k - 1 tokens, newest last."""

    inputs: jax.Array  # [B, k - 1, ...]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        num_tokens: int,  # k - 1
        channels: tuple[int, ...],  # axes of the input of one token
        dtype: Any,
    ) -> "NeighborCache":
        """Return a cache without tokens."""
        return cls(jnp.zeros((batch_size, num_tokens, *channels), dtype))

    def append(
        self,
        x: jax.Array,  # [B, T, ...]
        positions: jax.Array,  # [B or 1, T]; -1: padding, at the end of a row
    ) -> "NeighborCache":
        """Return the cache with the last k - 1 of its tokens and T more."""

        def last(row: jax.Array, num_new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(row, num_new, self.inputs.shape[1])

        # Rows have different numbers of new tokens. Padding is at the end, so the last k - 1 tokens
        # of a row with n new ones begin at index n of old and new together.
        row = jnp.concatenate([self.inputs, x.astype(self.inputs.dtype)], axis=1)
        is_token = jnp.broadcast_to(positions >= 0, x.shape[:2])
        return NeighborCache(jax.vmap(last)(row, jnp.sum(is_token, axis=1)))

    def read(self, dtype: Any) -> jax.Array:  # [B, k - 1, ...]
        """Return the inputs in `dtype`."""
        return self.inputs.astype(dtype)


def neighbor_window(
    x: jax.Array,  # [B, T, ...]
    num_before: int,
    num_after: int,
    *,
    positions: jax.Array,  # [B or 1, T]
    mask: Mask,
    cache: NeighborCache | None = None,  # of `num_before` tokens; None: no previous tokens
) -> jax.Array:  # [B, T, num_before + 1 + num_after, ...] in the order of the row
    """Stack each token with its neighbors of the same document; zeros elsewhere."""
    length, taps = x.shape[1], num_before + 1 + num_after
    zeros = lambda count: jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype)  # noqa: E731
    before = zeros(num_before) if cache is None else cache.read(x.dtype)
    windows = _windows(jnp.concatenate([before, x, zeros(num_after)], axis=1), length, taps)
    visible = None
    if cache is not None:
        # A row of the cache holds one document, whose first token has position 0: what precedes it
        # in the cache is another document's, or zeros.
        visible = positions[:, :, None] - num_before + jnp.arange(taps)[None, None, :] >= 0
    elif (segments := token_segments(mask, length)) is not None:
        padded = jnp.pad(segments, ((0, 0), (num_before, num_after)))
        neighbor_segments = _windows(padded, length, taps)
        # Zeros beyond the row are segment 0, too.
        visible = (neighbor_segments == segments[:, :, None]) & (neighbor_segments != 0)
    if visible is None:
        return windows
    return jnp.where(visible.reshape(visible.shape + (1,) * (windows.ndim - 3)), windows, 0)


def _windows(row: jax.Array, length: int, taps: int) -> jax.Array:
    """Stack shifted copies of a row: [B, T + taps - 1, ...] -> [B, T, taps, ...]."""
    # Slices at static offsets: XLA fuses them into what reads the windows, which it would not do
    # with a gather by an array of indices.
    return jnp.stack([row[:, tap : tap + length] for tap in range(taps)], axis=2)

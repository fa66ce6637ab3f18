"""Two-sided sliding window with one dilation per head (Beltagy et al. 2020, section 3.1)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.backends.blockwise import (
    DEFAULT_BLOCK_SIZE,
    PartialAttention,
    attend_blockwise,
)
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.score_spec import ScoreSpec
from transformer.layers.dropout import fold_in

MIN_TILE_SIZE = 64


def attend_dilated(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,  # causal or not; with positions, segments and key_segments
    scoring: ScoreSpec,
    one_sided_window: int,  # keys on each side, beside the query's own
    dilations: Sequence[int],  # of each head, or one for all
    max_tile_size: int = DEFAULT_BLOCK_SIZE,  # the most queries, and keys, that are scored at once
) -> PartialAttention:
    """Attend to keys 0, d, 2 d, ..., window * d positions away (causal: to those before).

    Positions must count up by one within a document. Cost O(T window) for any dilation. Keys with
    `key_positions` of their own, such as cached keys, may be in any order at a cost of O(T S).
    """
    if len(set(dilations)) == 1:
        return _dilated(q, k, v, mask, scoring, one_sided_window, dilations[0], max_tile_size)
    each, group = np.array(dilations), q.shape[2] // k.shape[2]
    parts, order = [], []
    for dilation in sorted(set(dilations)):
        heads = np.flatnonzero(each == dilation)
        theirs = (q[:, :, heads], k[:, :, heads // group], v[:, :, heads // group])
        again = scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, dilation))
        parts.append(_dilated(*theirs, mask, again, one_sided_window, dilation, max_tile_size))
        order += list(heads)
    back = np.argsort(order)
    y = jnp.concatenate([part.y for part in parts], axis=2)[:, :, back]
    return PartialAttention(y, jnp.concatenate([part.lse for part in parts], axis=1)[:, back])


def _dilated(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    scoring: ScoreSpec,
    window: int,
    dilation: int,
    tile: int,
) -> PartialAttention:
    """Attend with the same dilation d in all heads.

    Reshape each row into d rows that hold every d-th token. The window has no gaps in them, so that
    the blockwise kernel skips everything outside it.
    """
    batch, length = q.shape[:2]
    block = min(max(window, MIN_TILE_SIZE), tile)
    pattern = MaskPattern(causal=mask.pattern.causal, window=window + 1)
    if mask.key_positions is not None:
        pattern = dataclasses.replace(pattern, dilation=dilation, ordered=False)
        return attend_blockwise(q, k, v, mask.replace(pattern=pattern), scoring)
    if dilation == 1:
        return attend_blockwise(q, k, v, mask.replace(pattern=pattern), scoring, block_size=block)

    def rows(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B d, T / d, ...]
        spare = [(0, 0)] * x.ndim
        spare[1] = (0, -length % dilation)
        cut = jnp.pad(x, spare).reshape(batch, -1, dilation, *x.shape[2:])
        return cut.swapaxes(1, 2).reshape(batch * dilation, -1, *x.shape[2:])

    def marks(x: Any) -> jax.Array:  # [B or 1, T] -> [B d, T / d]
        return rows(jnp.broadcast_to(x, (batch, length)))

    def back(x: jax.Array) -> jax.Array:  # [B d, T / d, ...] -> [B, T, ...]
        cut = x.reshape(batch, dilation, *x.shape[1:]).swapaxes(1, 2)
        return cut.reshape(batch, -1, *x.shape[2:])[:, :length]

    dropout_rngs = scoring.dropout_rngs
    if dropout_rngs is not None:
        dropout_rngs = jax.vmap(lambda key: jax.random.split(key, dilation))(dropout_rngs).reshape(
            -1
        )
    apart = Mask(
        pattern,
        positions=marks(mask.positions) // dilation,
        segments=marks(mask.segments),
        key_segments=marks(mask.key_segments),
    )
    looked = attend_blockwise(
        rows(q),
        rows(k),
        rows(v),
        apart,
        scoring._replace(dropout_rngs=dropout_rngs),
        block_size=block,
    )
    return PartialAttention(back(looked.y), back(looked.lse.swapaxes(1, 2)).swapaxes(1, 2))

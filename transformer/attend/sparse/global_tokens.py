"""Global tokens: every token sees them, and they see every token of their document.

They are known by their positions. In a row of one document they are gathered once for all queries;
in a pack each document has its own (`packed_globals`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import Looked, attend_blockwise
from transformer.attend.scoring import Scoring
from transformer.attend.sparse.rows import take_rows
from transformer.masks import Mask


def distinct(
    listed: jax.Array,  # [B or 1, n] positions; -1: none
) -> jax.Array:  # [B or 1, n]
    """With -1 in place of a position that stands before."""
    same = listed[:, :, None] == listed[:, None, :]
    before = jnp.tri(listed.shape[1], k=-1, dtype=bool)[None]
    return jnp.where((same & before).any(-1), -1, listed)


def are_global(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    listed: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, T] booleans
    """Which tokens are global; padding is not."""
    positions: Any = mask.positions
    found = (positions[:, :, None] == listed[:, None, :]).any(-1)
    return found & (mask.key_segments != 0)


def of_one_document(
    mask: Mask,  # with key_segments [B or 1, T]
) -> jax.Array:  # [] boolean
    """Whether no row is a pack; padding may be anywhere."""
    segments: Any = mask.key_segments
    return jnp.all((segments == segments.max(axis=1, keepdims=True)) | (segments == 0))


def as_one_document(
    mask: Mask,  # with key_segments [B or 1, T], of one document
) -> Mask:
    """With the document numbered 1, as `attend_to_globals` has it."""
    segments: Any = mask.key_segments
    there = (segments != 0).astype(jnp.int32)
    return mask.replace(segments=there, key_segments=there)


def global_index(
    mask: Mask,  # with positions and key_segments [B or 1, T], of one document
    listed: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, n]
    """Where the token of each position stands; T: nowhere."""
    positions: Any = mask.positions
    places = jnp.where(mask.key_segments != 0, positions, -1)
    found = (places[:, None, :] == listed[:, :, None]) & (listed >= 0)[:, :, None]
    return jnp.where(found.any(-1), found.argmax(-1), positions.shape[1])


def attend_to_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # with positions and segments [B or 1, T]
    scoring: Scoring,
    index: jax.Array,  # [B or 1, n]; T: none
) -> Looked:
    """What queries find over the global keys alone: O(n T)."""
    there = (index < q.shape[1]).astype(jnp.int32)
    positions: Any = mask.positions
    theirs = mask.over(take_rows(positions, index), there)
    return attend_blockwise(q, take_rows(k, index), take_rows(v, index), theirs, scoring)

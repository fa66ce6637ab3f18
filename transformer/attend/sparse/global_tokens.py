"""Global tokens: every token sees them, and they see every token of their document.

They are known by their positions. In a row of one document they are gathered once for all queries;
in a pack each document has its own (`packed_globals`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import PartialAttention, attend_blockwise
from transformer.attend.scoring import ScoreSpec
from transformer.attend.sparse.rows import gather_tokens
from transformer.masks import Mask


def mask_duplicates(
    global_positions: jax.Array,  # [B or 1, n] positions; -1: none
) -> jax.Array:  # [B or 1, n]
    """With -1 in place of a position that stands before."""
    same = global_positions[:, :, None] == global_positions[:, None, :]
    before = jnp.tri(global_positions.shape[1], k=-1, dtype=bool)[None]
    return jnp.where((same & before).any(-1), -1, global_positions)


def is_global_token(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, T] booleans
    """Which tokens are global; padding is not."""
    positions: Any = mask.positions
    found = (positions[:, :, None] == global_positions[:, None, :]).any(-1)
    return found & (mask.key_segments != 0)


def has_single_document_rows(
    mask: Mask,  # with key_segments [B or 1, T]
) -> jax.Array:  # [] boolean
    """Whether no row is a pack; padding may be anywhere."""
    segments: Any = mask.key_segments
    return jnp.all((segments == segments.max(axis=1, keepdims=True)) | (segments == 0))


def as_single_document(
    mask: Mask,  # with key_segments [B or 1, T], of one document
) -> Mask:
    """With the document numbered 1, as `attend_to_globals` has it."""
    segments: Any = mask.key_segments
    there = (segments != 0).astype(jnp.int32)
    return mask.replace(segments=there, key_segments=there)


def find_global_tokens(
    mask: Mask,  # with positions and key_segments [B or 1, T], of one document
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, n]
    """Where the token of each position stands; T: nowhere."""
    positions: Any = mask.positions
    places = jnp.where(mask.key_segments != 0, positions, -1)
    found = (places[:, None, :] == global_positions[:, :, None]) & (global_positions >= 0)[
        :, :, None
    ]
    return jnp.where(found.any(-1), found.argmax(-1), positions.shape[1])


def attend_to_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # with positions and segments [B or 1, T]
    scoring: ScoreSpec,
    index: jax.Array,  # [B or 1, n]; T: none
) -> PartialAttention:
    """What queries find over the global keys alone: O(n T)."""
    there = (index < q.shape[1]).astype(jnp.int32)
    positions: Any = mask.positions
    theirs = mask.with_keys(gather_tokens(positions, index), there)
    return attend_blockwise(q, gather_tokens(k, index), gather_tokens(v, index), theirs, scoring)

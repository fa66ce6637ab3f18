"""Documents of a row: the document of each token, and where documents start.

For mixers that do not compare queries with keys. A mixer that carries a state from token to token
resets it at the first token of each document; padding leaves it unchanged. Decoding resumes from a
cached state: there position 0 starts a document, and padding has position -1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer.attention.masks import Mask


def token_segments(
    mask: Mask,
    length: int,  # T
) -> Int[Array, "#B T"] | None:
    """Return the document of each token, 0 for padding by `segments` or `key_lengths`.

    None: one document without padding.
    """
    if mask.key_lengths is None:
        return mask.segments
    is_token = jnp.arange(length)[None, :] < mask.key_lengths[:, None]
    return jnp.where(is_token, 1 if mask.segments is None else mask.segments, 0)


def segments_of_keys(
    mask: Mask,
    length: int,  # S
) -> jax.Array | None:  # [B or 1, S]
    """Return the document of each key, 0 for padding. None: one document without padding."""
    if mask.segments is not None:
        mask = mask.replace(segments=mask.resolved_key_segments)
    return token_segments(mask, length)


def previous_segments(
    segments: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    """Return the document of the last non-padding token before each token; 0 if there is none."""
    index = jnp.arange(segments.shape[1])[None, :]
    token_index = jax.lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    previous_index = jnp.pad(token_index, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    segment = jnp.take_along_axis(segments, jnp.maximum(previous_index, 0), axis=1)
    return jnp.where(previous_index < 0, 0, segment)


class DocumentBoundaries(NamedTuple):
    """Tokens at which the state is reset, and tokens at which it is updated."""

    is_start: Bool[Array, "#B T"]  # True at the first token of a document
    is_token: Bool[Array, "#B T"]  # False for padding


def document_boundaries(
    mask: Mask,
    positions: Int[Array, "#B T"],
    *,
    cached: bool = False,
    backward: bool = False,
) -> DocumentBoundaries | None:
    """Return boundaries from segments, lengths and positions; None: one document, no padding.

    Args:
      mask: Segments and lengths of the row.
      positions: Position of each token; -1 marks padding if `cached`.
      cached: The row continues from a cached state, so its first token starts no document unless
        its position is 0.
      backward: The row is read from its end.
    """
    segments = token_segments(mask, positions.shape[1])
    if backward and segments is not None:
        # The last token of a document is the first one that is read.
        segments = jnp.flip(segments, axis=1)
    # A new token's predecessor is in the cache, without its segment. But a row of the cache holds
    # one document, so its positions tell where it starts.
    if cached:
        is_token = positions >= 0 if segments is None else (positions >= 0) & (segments != 0)
        return DocumentBoundaries((positions == 0) & is_token, is_token)
    if segments is None:
        return None
    is_token = segments != 0
    return DocumentBoundaries(is_token & (segments != previous_segments(segments)), is_token)

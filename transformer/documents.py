"""Which document each token belongs to, for mixers that compare no queries with keys."""

import jax
import jax.numpy as jnp

from transformer.masks import Mask


def token_segments(
    mask: Mask,
    length: int,  # T
) -> jax.Array | None:  # [B or 1, T]
    """The segments of a row, 0 also where `lengths` says that there is nothing.

    None: one document, and no padding.
    """
    if mask.key_lengths is None:
        return mask.segments
    there = jnp.arange(length)[None, :] < mask.key_lengths[:, None]
    return jnp.where(there, 1 if mask.segments is None else mask.segments, 0)


def previous_segments(
    segments: jax.Array,  # [B, T]
) -> jax.Array:  # [B, T]
    """The document of the last token before each that is no padding; 0 if there is none."""
    index = jnp.arange(segments.shape[1])[None, :]
    last = jax.lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    found = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1)
    return jnp.where(before < 0, 0, found)

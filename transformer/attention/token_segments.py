"""Documents of tokens, for mixers that do not compare queries with keys."""

import jax
import jax.numpy as jnp

from transformer.attention.masks import Mask


def token_segments(
    mask: Mask,
    length: int,  # T
) -> jax.Array | None:  # [B or 1, T]
    """Return the document of each token, 0 for padding by `segments` or `key_lengths`.

    None: one document without padding.
    """
    if mask.key_lengths is None:
        return mask.segments
    is_token = jnp.arange(length)[None, :] < mask.key_lengths[:, None]
    return jnp.where(is_token, 1 if mask.segments is None else mask.segments, 0)


def previous_segments(
    segments: jax.Array,  # [B, T]
) -> jax.Array:  # [B, T]
    """Return the document of the last non-padding token before each token; 0 if there is none."""
    index = jnp.arange(segments.shape[1])[None, :]
    last = jax.lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    segment = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1)
    return jnp.where(before < 0, 0, segment)

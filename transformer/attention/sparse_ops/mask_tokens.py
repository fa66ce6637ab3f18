"""Positions and segments of the queries and keys of a mask, with its defaults written out."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from transformer.attention.masks import Mask


class Tokens(NamedTuple):
    """Positions and segments of tokens."""

    positions: Int[Array, "#B T"]
    segments: Int[Array, "#B T"]  # 0: padding


def query_and_key_tokens(mask: Mask, num_queries: int, num_keys: int) -> tuple[Tokens, Tokens]:
    """Return positions and segments of queries and keys; keys beyond the lengths get segment 0."""
    query_positions, key_positions = mask.resolved_positions(num_queries, num_keys)
    # As in `dense_mask`: segments of keys count only where the queries have some to compare them
    # with.
    if mask.segments is None:
        query_segments = jnp.ones((1, num_queries), jnp.int32)
        key_segments = jnp.ones((1, num_keys), jnp.int32)
    else:
        query_segments = mask.segments
        key_segments = mask.segments if mask.key_segments is None else mask.key_segments
    if mask.key_lengths is not None:
        is_token = jnp.arange(num_keys)[None, :] < mask.key_lengths[:, None]
        key_segments = jnp.where(is_token, key_segments, 0)
    return Tokens(query_positions, query_segments), Tokens(key_positions, key_segments)

"""A few queries that see everything, among many that do not: their rows alone, put in place."""

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import attend_blockwise
from transformer.attend.scoring import ScoreSpec
from transformer.masks import Mask


def gather_tokens(
    x: jax.Array,  # [B, T, ...] or [1, T, ...]
    index: jax.Array,  # [B or 1, n]; T: none, which takes the last
) -> jax.Array:  # [B or 1, n, ...]
    """The tokens at `index` of each example."""
    batch = max(len(x), len(index))
    row = jnp.arange(batch)[:, None]
    here = jnp.broadcast_to(jnp.minimum(index, x.shape[1] - 1), (batch, index.shape[1]))
    return jnp.asarray(x)[row if len(x) > 1 else jnp.zeros_like(row), here]


def attend_from_tokens(
    q: jax.Array,  # [B, n, N, H] of those few
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # of self attention over T tokens
    scoring: ScoreSpec,
    index: jax.Array,  # [B or 1, n] where they stand; T: nowhere
) -> jax.Array:  # [B, n, N, H of values]
    """What queries that stand at `index` find over all keys that the mask shows: O(n T)."""
    length = k.shape[1]
    positions, theirs = mask.resolved_positions(length, length)
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    keys_of = segments if mask.key_segments is None else mask.key_segments
    theirs_alone = mask.replace(
        positions=gather_tokens(positions, index),
        segments=jnp.where(index < length, gather_tokens(segments, index), 0),
    )
    return attend_blockwise(q, k, v, theirs_alone.with_keys(theirs, keys_of), scoring).y


def scatter_tokens(
    y: jax.Array,  # [B, T, ...]
    updates: jax.Array,  # [B, n, ...]
    index: jax.Array,  # [B or 1, n]; T: nowhere
) -> jax.Array:  # [B, T, ...]
    """`y` with other rows at `index`."""
    places = jnp.broadcast_to(index, updates.shape[:2])
    return y.at[jnp.arange(len(y))[:, None], places].set(updates, mode="drop")

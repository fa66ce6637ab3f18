"""The tokens around each token, as convolutions take them: of its own document, and no padding."""

import jax
import jax.numpy as jnp

from transformer.documents import token_segments
from transformer.masks import Mask


def neighbor_window(
    x: jax.Array,  # [B, T, ...]
    num_before: int,
    num_after: int,
    *,
    positions: jax.Array,  # [B or 1, T]
    mask: Mask,
    history: jax.Array | None = None,  # [B, behind, ...] the inputs before; None: there are none
) -> jax.Array:  # [B, T, behind + 1 + ahead, ...] in the order of the row
    """Each token with `num_before` before it and `num_after` after it; zeros for what it must not see."""
    length, taps = x.shape[1], num_before + 1 + num_after
    before = jnp.zeros((len(x), num_before, *x.shape[2:]), x.dtype) if history is None else history
    after = jnp.zeros((len(x), num_after, *x.shape[2:]), x.dtype)
    found = _windows(jnp.concatenate([before, x, after], axis=1), length, taps)
    seen = None
    if history is not None:  # what came before position 0 is of another document
        seen = positions[:, :, None] - num_before + jnp.arange(taps)[None, None, :] >= 0
    elif (segments := token_segments(mask, length)) is not None:
        theirs = _windows(jnp.pad(segments, ((0, 0), (num_before, num_after))), length, taps)
        seen = (theirs == segments[:, :, None]) & (theirs != 0)
    if seen is None:
        return found
    return jnp.where(seen.reshape(seen.shape + (1,) * (found.ndim - 3)), found, 0)


def _windows(row: jax.Array, length: int, taps: int) -> jax.Array:
    """[B, T + taps - 1, ...] -> [B, T, taps, ...]."""
    return jnp.stack([row[:, tap : tap + length] for tap in range(taps)], axis=2)


def update_history(
    history: jax.Array,  # [B, behind, ...]
    x: jax.Array,  # [B, T, ...]
    positions: jax.Array,  # [B, T] -1 for padding, which stands last
) -> jax.Array:  # [B, behind, ...]
    """The last inputs of each row, for the call that goes on from here."""

    def last(row: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, count, history.shape[1])

    row = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    real = jnp.broadcast_to(positions >= 0, x.shape[:2])
    return jax.vmap(last)(row, jnp.sum(real, axis=1))

"""The tokens around each token, as convolutions take them: of its own document, and no padding."""

import jax
import jax.numpy as jnp

from transformer.documents import documents
from transformer.masks import Mask


def around(
    x: jax.Array,  # [B, T, ...]
    behind: int,
    ahead: int,
    *,
    positions: jax.Array,  # [B or 1, T]
    mask: Mask,
    past: jax.Array | None = None,  # [B, behind, ...] the inputs before; None: there are none
) -> jax.Array:  # [B, T, behind + 1 + ahead, ...] in the order of the row
    """Each token with `behind` before it and `ahead` after it; zeros for what it must not see."""
    length, taps = x.shape[1], behind + 1 + ahead
    before = jnp.zeros((len(x), behind, *x.shape[2:]), x.dtype) if past is None else past
    after = jnp.zeros((len(x), ahead, *x.shape[2:]), x.dtype)
    found = _windows(jnp.concatenate([before, x, after], axis=1), length, taps)
    seen = None
    if past is not None:  # what came before position 0 is of another document
        seen = positions[:, :, None] - behind + jnp.arange(taps)[None, None, :] >= 0
    elif (segments := documents(mask, length)) is not None:
        theirs = _windows(jnp.pad(segments, ((0, 0), (behind, ahead))), length, taps)
        seen = (theirs == segments[:, :, None]) & (theirs != 0)
    if seen is None:
        return found
    return jnp.where(seen.reshape(seen.shape + (1,) * (found.ndim - 3)), found, 0)


def _windows(row: jax.Array, length: int, taps: int) -> jax.Array:
    """[B, T + taps - 1, ...] -> [B, T, taps, ...]."""
    return jnp.stack([row[:, tap : tap + length] for tap in range(taps)], axis=2)


def remembered(
    past: jax.Array,  # [B, behind, ...]
    x: jax.Array,  # [B, T, ...]
    positions: jax.Array,  # [B, T] -1 for padding, which stands last
) -> jax.Array:  # [B, behind, ...]
    """The last inputs of each row, for the call that goes on from here."""

    def last(row: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, count, past.shape[1])

    row = jnp.concatenate([past, x.astype(past.dtype)], axis=1)
    real = jnp.broadcast_to(positions >= 0, x.shape[:2])
    return jax.vmap(last)(row, jnp.sum(real, axis=1))

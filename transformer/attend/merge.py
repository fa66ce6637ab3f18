"""One softmax over several sets of keys, each looked at by itself."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import Looked


def merge(parts: Sequence[Looked]) -> Looked:
    """What attention over the union of disjoint sets of keys would have found.

    A query that sees nothing in any of them has zeros. Parts in 16 bits are merged in the dtype of
    their logarithms, and the result is rounded to 16 bits again; parts of `Scoring.widened` arrays
    are rounded nowhere.
    """
    lse = jnp.stack([part.lse for part in parts])  # [parts, B, N, T]
    largest = lse.max(0)
    # It cancels, so no gradient goes through it.
    largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    shares = jnp.exp(lse - largest[None])
    total = shares.sum(0)
    some = total > 0
    shares = shares / jnp.where(some, total, 1)[None]
    y = sum(
        (
            part.y * share.swapaxes(1, 2)[..., None]
            for part, share in zip(parts, shares, strict=True)
        ),
        start=jnp.zeros((), shares.dtype),
    )
    whole = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + largest, -jnp.inf)
    return Looked(y.astype(parts[0].y.dtype), whole)


def sink(
    looked: Looked,
    sinks: jax.Array,  # [N]
) -> Looked:
    """As if there were one more key of this score, whose value is zero."""
    lse = jnp.logaddexp(looked.lse, sinks.astype(looked.lse.dtype)[None, :, None])
    share = jnp.exp(looked.lse - lse).swapaxes(1, 2)[..., None]
    return Looked((looked.y * share).astype(looked.y.dtype), lse)

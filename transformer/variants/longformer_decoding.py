"""Longformer token by token: a window's tokens are kept, and the global ones twice."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attend import Looked, Scoring, attend_blockwise, merge
from transformer.attend.sparse.dilated import attend_dilated
from transformer.attend.sparse.rows import put_rows
from transformer.dropout import fold
from transformer.heads import Heads, project
from transformer.masks import Mask
from transformer.mixers import Mixer
from transformer.ring_cache import RingCache, look_back, placed
from transformer.variants.configs import LongformerConfig


class FirstTokens(struct.PyTreeNode):
    """Keys and values of the first n tokens alone: those of position p stand in slot p."""

    keys: jax.Array  # [B, n, K, H]
    values: jax.Array  # [B, n, K, H]

    def write(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H]
        positions: jax.Array,  # [B, T], negative for padding
    ) -> "FirstTokens":
        """With those of T more tokens that are among the first n."""
        slots = jnp.where(positions < 0, self.keys.shape[1], positions)  # beyond: nowhere
        return FirstTokens(
            put_rows(self.keys, keys.astype(self.keys.dtype), slots),
            put_rows(self.values, values.astype(self.values.dtype), slots),
        )


class LongformerCache(struct.PyTreeNode):
    """Its size does not grow with the length."""

    near: RingCache
    """The tokens that a window reaches."""
    seen: FirstTokens
    """Global tokens as others see them."""
    seeing: FirstTokens
    """The same by projections of their own: as they see each other."""

    @classmethod
    def empty(
        cls,
        batch: int,
        reach: int,  # R
        first: int,  # n, global tokens
        heads: int,  # K
        width: int,  # H
        dtype: str,
    ) -> "LongformerCache":
        """Room for R and n tokens, and none of them there."""
        zeros = jnp.zeros((batch, first, heads, width), dtype)
        few = FirstTokens(zeros, zeros)
        return cls(RingCache.empty(batch, reach, heads, width, dtype), few, few)


def decoded(
    mixer: Mixer,  # Longformer, whose projections it reads
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # [B or 1, T]; -1: padding
    own: Heads,
    mask: Mask,  # causal
    scoring: Scoring,
    cache: LongformerCache,
) -> tuple[jax.Array, LongformerCache]:  # [B, T, N, H]
    """New tokens after those of a cache, whose global tokens are the first ones.

    Raises ValueError for a mask that is not causal, and for one that lists other global tokens.
    """
    if not mask.pattern.causal:
        raise ValueError("mixer longformer: decodes under a causal mask; give one")
    if mask.globals is not None:
        raise ValueError(
            "mixer longformer: decodes with the first tokens as global ones; give a mask without "
            "globals, and longformer.global_tokens"
        )
    here = placed(positions, len(x))
    first = cache.seen.keys.shape[1]
    scoring = scoring._replace(operands=own.q.dtype.name)
    near = _near(mixer, own, mask, scoring, cache.near, here, first)
    ring, seen = cache.near.write(own.k, own.v, here), cache.seen.write(own.k, own.v, here)
    if not first:
        return near.y.astype(own.v.dtype), cache.replace(near=ring, seen=seen)
    far, last = (scoring._replace(dropout_rngs=fold(scoring.dropout_rngs, part)) for part in (1, 2))
    mask = Mask(mask.pattern, positions=here).over(jnp.arange(first)[None, :])
    far, wide = far.widened(own.q, seen.keys, seen.values)
    y = merge([near, attend_blockwise(*wide, mask, far)]).y.astype(own.v.dtype)
    are_global = (here >= 0) & (here < first)

    def rows(mixer: Mixer) -> tuple[jax.Array, FirstTokens]:
        theirs = project(mixer, x, positions, mixer.config, mixer.shared, "_global")
        seeing = cache.seeing.write(theirs.k, theirs.v, here)
        found = attend_blockwise(theirs.q, seeing.keys, seeing.values, mask, last).y
        return jnp.where(are_global[:, :, None, None], found, y), seeing

    if mixer.is_initializing():
        y, seeing = rows(mixer)
    else:  # hardly ever is there one among the new tokens
        y, seeing = nn.cond(are_global.any(), rows, lambda mixer: (y, cache.seeing), mixer)
    return y, LongformerCache(ring, seen, seeing)


def _near(
    mixer: Mixer,
    own: Heads,
    mask: Mask,
    scoring: Scoring,
    ring: RingCache,
    here: jax.Array,  # [B, T]
    first: int,
) -> Looked:
    """What new tokens find in their window, global keys left out."""
    config: LongformerConfig = mixer.config
    q, k, v, mask, places, before = look_back(ring, *own, mask, here)
    there = jnp.ones_like(places) if mask.segments is None else mask.segments
    hidden = (places >= 0) & (places < first)
    mask = mask.replace(
        segments=jnp.ones_like(here) if mask.segments is None else mask.segments,
        key_segments=jnp.where(hidden, 0, there),
    )
    again = scoring._replace(dropout_rngs=fold(scoring.dropout_rngs, 0))
    sizes = config.window, config.dilations, mixer.shared.hardware.tile
    again, (q, k, v) = again.widened(q, k, v)
    looked = attend_dilated(q, k, v, mask, again, *sizes)
    return Looked(looked.y[:, before:], looked.lse[:, :, before:])

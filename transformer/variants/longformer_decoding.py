"""Longformer token by token: a window's tokens are kept, and the global ones twice."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attend import PartialAttention, ScoreSpec, attend_blockwise, merge_partials
from transformer.attend.sparse.dilated import attend_dilated
from transformer.attend.sparse.rows import scatter_tokens
from transformer.dropout import fold_in
from transformer.heads import QKV, project_qkv
from transformer.masks import Mask
from transformer.mixers import Mixer
from transformer.ring_cache import RollingCache, mark_padding, prepend_cached_keys
from transformer.variants.configs import LongformerConfig


class GlobalTokenCache(struct.PyTreeNode):
    """Keys and values of the first n tokens alone: those of position p stand in slot p."""

    keys: jax.Array  # [B, n, K, H]
    values: jax.Array  # [B, n, K, H]

    def append(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H]
        positions: jax.Array,  # [B, T], negative for padding
    ) -> "GlobalTokenCache":
        """With those of T more tokens that are among the first n."""
        slots = jnp.where(positions < 0, self.keys.shape[1], positions)  # beyond: nowhere
        return GlobalTokenCache(
            scatter_tokens(self.keys, keys.astype(self.keys.dtype), slots),
            scatter_tokens(self.values, values.astype(self.values.dtype), slots),
        )


class LongformerCache(struct.PyTreeNode):
    """Its size does not grow with the length."""

    window: RollingCache
    """The tokens that a window reaches."""
    global_kv: GlobalTokenCache
    """Global tokens as others see them."""
    global_query_kv: GlobalTokenCache
    """The same by projections of their own: as they see each other."""

    @classmethod
    def empty(
        cls,
        batch: int,
        window_length: int,  # R
        num_global_tokens: int,  # n, global tokens
        num_kv_heads: int,  # K
        head_dim: int,  # H
        dtype: str,
    ) -> "LongformerCache":
        """Room for R and n tokens, and none of them there."""
        zeros = jnp.zeros((batch, num_global_tokens, num_kv_heads, head_dim), dtype)
        few = GlobalTokenCache(zeros, zeros)
        return cls(
            RollingCache.empty(batch, window_length, num_kv_heads, head_dim, dtype), few, few
        )


def attend_cached(
    mixer: Mixer,  # Longformer, whose projections it reads
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # [B or 1, T]; -1: padding
    own: QKV,
    mask: Mask,  # causal
    scoring: ScoreSpec,
    cache: LongformerCache,
) -> tuple[jax.Array, LongformerCache]:  # [B, T, N, H]
    """New tokens after those of a cache, whose global tokens are the first ones.

    Raises ValueError for a mask that is not causal, and for one that lists other global tokens.
    """
    if not mask.pattern.causal:
        raise ValueError("mixer longformer: decodes under a causal mask; give one")
    if mask.global_positions is not None:
        raise ValueError(
            "mixer longformer: decodes with the first tokens as global ones; give a mask without "
            "globals, and longformer.global_tokens"
        )
    here = mark_padding(positions, len(x))
    first = cache.global_kv.keys.shape[1]
    scoring = scoring._replace(operand_dtype=own.q.dtype.name)
    near = _near(mixer, own, mask, scoring, cache.window, here, first)
    ring, seen = cache.window.append(own.k, own.v, here), cache.global_kv.append(own.k, own.v, here)
    if not first:
        return near.y.astype(own.v.dtype), cache.replace(near=ring, seen=seen)
    far, last = (
        scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, part)) for part in (1, 2)
    )
    mask = Mask(mask.pattern, positions=here).with_keys(jnp.arange(first)[None, :])
    far, wide = far.widen(own.q, seen.keys, seen.values)
    y = merge_partials([near, attend_blockwise(*wide, mask, far)]).y.astype(own.v.dtype)
    are_global = (here >= 0) & (here < first)

    def rows(mixer: Mixer) -> tuple[jax.Array, GlobalTokenCache]:
        theirs = project_qkv(mixer, x, positions, mixer.config, mixer.context, "_global")
        seeing = cache.global_query_kv.append(theirs.k, theirs.v, here)
        found = attend_blockwise(theirs.q, seeing.keys, seeing.values, mask, last).y
        return jnp.where(are_global[:, :, None, None], found, y), seeing

    if mixer.is_initializing():
        y, seeing = rows(mixer)
    else:  # hardly ever is there one among the new tokens
        y, seeing = nn.cond(are_global.any(), rows, lambda mixer: (y, cache.global_query_kv), mixer)
    return y, LongformerCache(ring, seen, seeing)


def _near(
    mixer: Mixer,
    own: QKV,
    mask: Mask,
    scoring: ScoreSpec,
    ring: RollingCache,
    here: jax.Array,  # [B, T]
    first: int,
) -> PartialAttention:
    """What new tokens find in their window, global keys left out."""
    config: LongformerConfig = mixer.config
    q, k, v, mask, places, before = prepend_cached_keys(ring, *own, mask, here)
    there = jnp.ones_like(places) if mask.segments is None else mask.segments
    hidden = (places >= 0) & (places < first)
    mask = mask.replace(
        segments=jnp.ones_like(here) if mask.segments is None else mask.segments,
        key_segments=jnp.where(hidden, 0, there),
    )
    again = scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, 0))
    sizes = config.one_sided_window, config.dilations, mixer.context.hardware.tile_size
    again, (q, k, v) = again.widen(q, k, v)
    looked = attend_dilated(q, k, v, mask, again, *sizes)
    return PartialAttention(looked.y[:, before:], looked.lse[:, :, before:])

"""The key-value caches of incremental decoding: plain pytrees, passed in and returned.

Row s of an example's cache holds the key of its token at position s. So examples of different
lengths share one cache: what stands beyond an example's last token is ahead of every query, and a
causal mask hides it until it is overwritten.

The cache of a window: it holds the last tokens alone, however many have come.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from transformer.attention.masks import Mask
from transformer.attention.sparse_ops.global_tokens import scatter_tokens


class KVCache(struct.PyTreeNode):
    """Keys and values of one layer."""

    keys: jax.Array  # [B, S, K, H]
    values: jax.Array  # [B, S, K, H of values]

    @property
    def positions(self) -> jax.Array:  # [1, S]
        return jnp.arange(self.keys.shape[1])[None, :]

    def append(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H of values]
        positions: jax.Array,  # [B or 1, T], consecutive within a row
    ) -> "KVCache":
        """The cache with T more tokens, at the positions given."""

        def put(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(row, new.astype(row.dtype), (start, 0, 0))

        start = jnp.broadcast_to(positions[:, 0], len(keys))
        return KVCache(
            keys=jax.vmap(put)(self.keys, keys, start),
            values=jax.vmap(put)(self.values, values, start),
        )


class MemoryCache(struct.PyTreeNode):
    """Keys and values of a memory, projected once: what one layer of cross attention keeps."""

    keys: jax.Array  # [B, S, K, H]
    values: jax.Array  # [B, S, K, H of values]

    def fill(
        self,
        keys: jax.Array,  # [B, S, K, H]
        values: jax.Array,  # [B, S, K, H of values]
    ) -> "MemoryCache":
        """The cache of another memory. Raises ValueError for one of another size."""
        if keys.shape != self.keys.shape:
            raise ValueError(
                f"a memory of {keys.shape[0]} x {keys.shape[1]} tokens: its cache is made for "
                f"{self.keys.shape[0]} x {self.keys.shape[1]}; give init_memory_cache its size"
            )
        return MemoryCache(keys.astype(self.keys.dtype), values.astype(self.values.dtype))


ABSENT_POSITION = -(2**30)
"""The position of a key that is not there: out of every window."""


class RollingCache(struct.PyTreeNode):
    """Keys and values of the last tokens: those of position p stand in slot p mod R."""

    keys: jax.Array  # [B, R, K, H]
    values: jax.Array  # [B, R, K, H]
    positions: jax.Array  # [B, R]

    @classmethod
    def empty(
        cls, batch: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "RollingCache":
        """Room for R = size tokens, and none of them there."""
        zeros = jnp.zeros((batch, num_slots, num_kv_heads, head_dim), dtype)
        return cls(zeros, zeros, jnp.full((batch, num_slots), ABSENT_POSITION))

    def append(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H]
        positions: jax.Array,  # [B, T], NOWHERE for padding
    ) -> "RollingCache":
        """The ring with those of T more tokens that will be needed: the last R."""
        size = self.positions.shape[1]
        needed = positions > jnp.max(positions, axis=1, keepdims=True) - size
        slots = jnp.where(needed & (positions >= 0), positions % size, size)  # size: nowhere
        return RollingCache(
            scatter_tokens(self.keys, keys.astype(self.keys.dtype), slots),
            scatter_tokens(self.values, values.astype(self.values.dtype), slots),
            scatter_tokens(self.positions, positions, slots),
        )

    def sorted_by_position(self) -> "RollingCache":
        """The same tokens in the order of their positions, empty slots first: no longer a ring."""
        order = jnp.argsort(self.positions, axis=1)
        rows = order[:, :, None, None]
        keys, values = (jnp.take_along_axis(x, rows, axis=1) for x in (self.keys, self.values))
        return RollingCache(keys, values, jnp.take_along_axis(self.positions, order, axis=1))

    def concatenate(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H]
        positions: jax.Array,  # [B, T], NOWHERE for padding
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # [B, R + T, K, H] twice, [B, R + T]
        """Keys, values and positions of these slots and, behind them, of T more tokens."""
        join = lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=1)  # noqa: E731
        return join(self.keys, keys), join(self.values, values), join(self.positions, positions)


class WindowInputs(NamedTuple):
    """New tokens, and what a ring kept of those before them."""

    q: jax.Array  # [B, T, N, H], or [B, R + T, N, H] with the first `before` of no interest
    k: jax.Array  # [B, R + T, K, H]
    v: jax.Array  # [B, R + T, K, H]
    mask: Mask  # of these queries over these keys
    key_positions: jax.Array  # [B, R + T] positions of the keys, NOWHERE where there is none
    num_padding_queries: int  # R or 0


def prepend_cached_keys(
    cache: RollingCache,
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    mask: Mask,  # of self attention over the new tokens
    positions: jax.Array,  # [B, T], NOWHERE for padding
) -> WindowInputs:
    """The new queries, and the keys of the ring and the new ones.

    Where the new tokens are more than the ring's, the two are taken as one row in order, each a
    query: only there does the index tell what a window hides, so that it is never visited. The R
    queries of the ring are for nothing then. A few new tokens, as when decoding, look at the R + T
    keys whatever their order.
    """
    size, pattern = cache.positions.shape[1], mask.pattern
    plain = (
        pattern.ordered
        and not pattern.prefix
        and mask.segments is None
        and not mask.has_extra_masks
    )
    if plain and q.shape[1] > size:
        k, v, places = cache.sorted_by_position().concatenate(k, v, positions)
        q = jnp.pad(q, [(0, 0), (size, 0), (0, 0), (0, 0)])
        there = (places != ABSENT_POSITION).astype(jnp.int32)
        return WindowInputs(q, k, v, mask.replace(positions=places, segments=there), places, size)
    k, v, places = cache.concatenate(k, v, positions)
    return WindowInputs(q, k, v, mask.with_keys(places, keys_include_queries=True), places, 0)


def mark_padding(
    positions: jax.Array,  # [B or 1, T]; -1: padding
    batch_size: int,  # B
) -> jax.Array:  # [B, T]
    """Positions as a ring takes them: NOWHERE for padding."""
    there = jnp.where(positions < 0, ABSENT_POSITION, positions)
    return jnp.broadcast_to(there, (batch_size, positions.shape[1]))

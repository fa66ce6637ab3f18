"""The key-value caches of incremental decoding: plain pytrees, passed in and returned.

Row s of an example's cache holds the key of its token at position s. So examples of different
lengths share one cache: what stands beyond an example's last token is ahead of every query, and a
causal mask hides it until it is overwritten.
"""

import jax
import jax.numpy as jnp
from flax import struct


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

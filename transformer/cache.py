"""The key-value cache of incremental decoding: a plain pytree, passed in and returned.

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

    def write(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H of values]
        positions: jax.Array,  # [B, T], consecutive within a row
    ) -> "KVCache":
        """The cache with T more tokens, at the positions given."""

        def put(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(row, new.astype(row.dtype), (start, 0, 0))

        start = positions[:, 0]
        return KVCache(
            keys=jax.vmap(put)(self.keys, keys, start),
            values=jax.vmap(put)(self.values, values, start),
        )

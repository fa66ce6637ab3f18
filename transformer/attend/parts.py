"""Heads of keys and values that are cut for devices."""

import jax
import jax.numpy as jnp


def repeat_kv_for_shards(
    x: jax.Array, num_shards: int
) -> jax.Array:  # [B, T, K, H] -> [B, T, K or parts, H]
    """Keys or values such that K divides into as many parts as the heads of the queries.

    Heads that several parts share are copied, one for each of them.
    """
    heads = x.shape[2]
    return (
        x
        if heads % num_shards == 0 or num_shards % heads
        else jnp.repeat(x, num_shards // heads, axis=2)
    )

"""Heads of keys and values that are cut for devices."""

import jax
import jax.numpy as jnp


def for_each_part(x: jax.Array, parts: int) -> jax.Array:  # [B, T, K, H] -> [B, T, K or parts, H]
    """Keys or values such that K divides into as many parts as the heads of the queries.

    Heads that several parts share are copied, one for each of them.
    """
    heads = x.shape[2]
    return x if heads % parts == 0 or parts % heads else jnp.repeat(x, parts // heads, axis=2)

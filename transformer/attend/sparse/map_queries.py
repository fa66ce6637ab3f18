"""Queries a block at a time, so that what each needs of all keys never exists for all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

QUERY_BLOCK_SIZE = 128

SAVED_QUERY_BLOCK_RESIDUALS = "kept of a block of queries"
"""The name (`checkpoint_name`) of what the backward pass does not compute again."""


def map_query_blocks(
    attend: Callable[..., jax.Array],
    queries: tuple[jax.Array, ...],  # [B, T, ...] each
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> jax.Array:  # [B, T, ...]
    """`attend(number of the block, *blocks [B, R, ...])` -> [B, R, ...], one block after the other.

    The last is filled up with zeros. The backward pass computes each block again, but for `KEPT`.
    """
    length = queries[0].shape[1]
    size = min(block_size, length)
    count = -(-length // size)

    def cut(x: jax.Array) -> jax.Array:  # [blocks, B, R, ...]
        room = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, room).reshape(len(x), count, size, *x.shape[2:]), 1, 0)

    def one(inputs: tuple[Any, ...]) -> jax.Array:
        kept = jax.checkpoint_policies.save_only_these_names(SAVED_QUERY_BLOCK_RESIDUALS)
        return jax.checkpoint(attend, policy=kept)(*inputs)

    y = jnp.moveaxis(jax.lax.map(one, (jnp.arange(count), *map(cut, queries))), 0, 1)
    return y.reshape(len(y), count * size, *y.shape[3:])[:, :length]

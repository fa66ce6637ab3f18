"""Which blocks of keys a block of queries sees in BigBird (Zaheer et al. 2020, section 2).

Blocks go by the index of their tokens: global ones, a window, and some at random.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.lru_cache(maxsize=64)
def draw_random_blocks(
    seed: int,
    layer: int,
    num_heads: int,  # N
    num_blocks: int,  # R, blocks of the span that is drawn from
    num_random_blocks: int,  # r, drawn for each block of queries
    num_window_blocks: int,  # blocks of the window: these are not drawn,
    num_global_blocks: int,  # nor the first ones, which are global
) -> np.ndarray:  # [N, R, r] ints; -1 where there are not so many
    """The same for the same seed and layer, on every machine and version of NumPy."""
    random = np.random.RandomState([seed, layer])  # the legacy generator never changes its stream
    table = np.full((num_heads, num_blocks, num_random_blocks), -1, np.int32)
    every = np.arange(num_blocks)
    for head, row in np.ndindex(num_heads, num_blocks):
        others = every[
            (np.abs(every - row) > num_window_blocks // 2) & (every >= num_global_blocks)
        ]
        drawn = random.permutation(others)[:num_random_blocks]
        table[head, row, : len(drawn)] = drawn
    return table


def select_blocks(
    random_blocks: Any,  # [N, R, r]
    num_blocks: int,
    num_window_blocks: int,
    num_global_blocks: int,
    global_last_block: jax.Array | None,  # [B or 1] the block that is global beside the first ones
    causal: bool,
) -> jax.Array:  # [B or 1, N, blocks, m], none of them twice; -1: none
    """Of each block of queries: the global blocks, its window, and its row of the table.

    Behind the table's R rows it starts again: each stretch of R blocks draws from itself.
    """
    own, rows = jnp.arange(num_blocks), random_blocks.shape[1]
    drawn = jnp.asarray(random_blocks)[:, own % rows]
    drawn = jnp.where(drawn < 0, -1, drawn + (own // rows * rows)[None, :, None])
    near = (
        own[:, None]
        + jnp.arange(-(num_window_blocks // 2), 1 if causal else num_window_blocks // 2 + 1)[
            None, :
        ]
    )
    parts = [jnp.arange(num_global_blocks)[None, None, None, :], near[None, None], drawn[None]]
    if global_last_block is not None:
        parts.append(global_last_block[:, None, None, None])
    batch = 1 if global_last_block is None else len(global_last_block)
    shape = (batch, len(random_blocks), num_blocks)
    chosen = jnp.concatenate(
        [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], axis=-1
    )
    chosen = jnp.where((chosen >= 0) & (chosen < num_blocks), chosen, -1)
    same = chosen[..., :, None] == chosen[..., None, :]
    earlier = jnp.tri(chosen.shape[-1], k=-1, dtype=bool)[None, None, None]
    return jnp.where((same & earlier).any(-1), -1, chosen)


def last_nonempty_block(
    segments: jax.Array | None,  # [B or 1, T]; 0 is padding
    length: int,  # T
    block_size: int,
) -> jax.Array:  # [B or 1]
    """The last block with a token that is no padding."""
    if segments is None:
        return jnp.full((1,), (length - 1) // block_size)
    index = jnp.where(segments != 0, jnp.arange(length)[None, :], 0)
    return index.max(1) // block_size

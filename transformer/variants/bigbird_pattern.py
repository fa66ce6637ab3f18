"""Which blocks of keys a block of queries sees in BigBird (Zaheer et al. 2020, section 2).

Blocks go by the index of their tokens: global ones, a window, and some at random.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.lru_cache(maxsize=64)
def random_blocks(
    seed: int,
    layer: int,
    heads: int,  # N
    rows: int,  # R, blocks of the span that is drawn from
    count: int,  # r, drawn for each block of queries
    window: int,  # blocks of the window: these are not drawn,
    first: int,  # nor the first ones, which are global
) -> np.ndarray:  # [N, R, r] ints; -1 where there are not so many
    """The same for the same seed and layer, on every machine and version of NumPy."""
    random = np.random.RandomState([seed, layer])  # the legacy generator never changes its stream
    table = np.full((heads, rows, count), -1, np.int32)
    every = np.arange(rows)
    for head, row in np.ndindex(heads, rows):
        others = every[(np.abs(every - row) > window // 2) & (every >= first)]
        drawn = random.permutation(others)[:count]
        table[head, row, : len(drawn)] = drawn
    return table


def chosen_blocks(
    table: Any,  # [N, R, r]
    blocks: int,
    window: int,
    first: int,
    last: jax.Array | None,  # [B or 1] the block that is global beside the first ones
    causal: bool,
) -> jax.Array:  # [B or 1, N, blocks, m], none of them twice; -1: none
    """Of each block of queries: the global blocks, its window, and its row of the table.

    Behind the table's R rows it starts again: each stretch of R blocks draws from itself.
    """
    own, rows = jnp.arange(blocks), table.shape[1]
    drawn = jnp.asarray(table)[:, own % rows]
    drawn = jnp.where(drawn < 0, -1, drawn + (own // rows * rows)[None, :, None])
    near = own[:, None] + jnp.arange(-(window // 2), 1 if causal else window // 2 + 1)[None, :]
    parts = [jnp.arange(first)[None, None, None, :], near[None, None], drawn[None]]
    if last is not None:
        parts.append(last[:, None, None, None])
    batch = 1 if last is None else len(last)
    shape = (batch, len(table), blocks)
    chosen = jnp.concatenate(
        [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts], axis=-1
    )
    chosen = jnp.where((chosen >= 0) & (chosen < blocks), chosen, -1)
    same = chosen[..., :, None] == chosen[..., None, :]
    earlier = jnp.tri(chosen.shape[-1], k=-1, dtype=bool)[None, None, None]
    return jnp.where((same & earlier).any(-1), -1, chosen)


def last_block(
    segments: jax.Array | None,  # [B or 1, T]; 0 is padding
    length: int,  # T
    block: int,
) -> jax.Array:  # [B or 1]
    """The last block with a token that is no padding."""
    if segments is None:
        return jnp.full((1,), (length - 1) // block)
    index = jnp.where(segments != 0, jnp.arange(length)[None, :], 0)
    return index.max(1) // block

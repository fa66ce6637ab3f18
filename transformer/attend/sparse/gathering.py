"""How blocks of keys are found and gathered for blocks of queries, step by step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.masks import Mask, MaskPattern, dense_mask


class BlockTokens(NamedTuple):
    """What the mask says of tokens, in blocks."""

    positions: jax.Array  # [B or 1, blocks, block]
    segments: jax.Array  # [B or 1, blocks, block]; 0: not there


class GatherStep(NamedTuple):
    """What one step starts from; of all steps, with a first axis over them."""

    step_index: jax.Array  # []
    q: jax.Array  # [B, N, group, block, H]
    query_tokens: BlockTokens  # [B or 1, group, block]
    selected: jax.Array  # [B or 1, N or 1, group, m]


def query_and_key_tokens(
    mask: Mask, num_queries: int, num_keys: int
) -> tuple[BlockTokens, BlockTokens]:  # [B or 1, T or S]
    """Of queries and of keys; those beyond the lengths are not there."""
    rows, columns = mask.resolved_positions(num_queries, num_keys)
    ones = lambda size: jnp.ones((1, size), jnp.int32)  # noqa: E731
    own = ones(num_queries) if mask.segments is None else mask.segments
    theirs = own if mask.key_segments is None else mask.key_segments
    if mask.segments is None:
        theirs = ones(num_keys)
    if mask.key_lengths is not None:
        theirs = jnp.where(jnp.arange(num_keys)[None, :] < mask.key_lengths[:, None], theirs, 0)
    return BlockTokens(rows, own), BlockTokens(columns, theirs)


def split_blocks(
    x: jax.Array,  # [B, T, ...]
    block_size: int,
    num_blocks: int = 0,  # of blocks; 0: as many as there are tokens for
) -> jax.Array:  # [B, blocks, block, ...]
    """In blocks, with zeros behind the last token."""
    num_blocks = num_blocks or -(-x.shape[1] // block_size)
    spare = [(0, 0)] * x.ndim
    spare[1] = (0, num_blocks * block_size - x.shape[1])
    return jnp.pad(x, spare).reshape(x.shape[0], num_blocks, block_size, *x.shape[2:])


def heads_first(x: jax.Array) -> jax.Array:  # [B, blocks, block, N, H] -> [B, N, blocks, block, H]
    """Heads before tokens, as products take them."""
    return jnp.moveaxis(x, 3, 1)


def split_steps(x: jax.Array, axis: int, num_steps: int) -> jax.Array:
    """The axis of blocks cut into steps, which come first."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_steps, -1, *x.shape[axis + 1 :]), axis, 0)


def block_indices(
    blocks: jax.Array,  # [B, K, blocks, block, H]
    step: GatherStep,
) -> tuple[jax.Array, ...]:  # [B, 1, 1, 1], [1, N, 1, 1], [B, N, group, m]
    """The index of each chosen block; one behind the last where none was."""
    batch, heads = step.q.shape[:2]
    example = jnp.arange(batch)[:, None, None, None]
    head = (jnp.arange(heads) // (heads // blocks.shape[1]))[None, :, None, None]
    found = jnp.where(step.selected < 0, blocks.shape[2], step.selected)
    return example, head, jnp.broadcast_to(found, (batch, heads, *found.shape[2:]))


def gather_blocks(blocks: jax.Array, step: GatherStep) -> jax.Array:  # [B, N, group, m block, H]
    """The chosen blocks of keys or values side by side."""
    found = jnp.asarray(blocks).at[block_indices(blocks, step)].get(mode="clip")
    return found.reshape(*found.shape[:3], -1, found.shape[-1])


def gathered_mask(
    pattern: MaskPattern, step: GatherStep, key_tokens: BlockTokens
) -> jax.Array:  # [B or 1, N or 1, group, block, m block]
    """Which of the gathered keys each query sees."""
    rows, chosen = step.query_tokens, step.selected
    batch = max(len(rows.segments), len(key_tokens.segments), len(rows.positions), len(chosen))
    shape = (batch, *chosen.shape[1:])
    chosen = jnp.broadcast_to(chosen, shape)
    example = jnp.arange(batch)[:, None, None, None]

    def queries(x: jax.Array) -> jax.Array:  # [B or 1, group, block] -> [all, block]
        return jnp.broadcast_to(x[:, None], (*shape[:3], x.shape[-1])).reshape(-1, x.shape[-1])

    def keys(x: jax.Array) -> jax.Array:  # [B or 1, blocks, block] -> [all, m block]
        here = x[example if len(x) > 1 else 0, jnp.maximum(chosen, 0)]
        return here.reshape(-1, shape[3] * x.shape[-1])

    there = jnp.repeat(chosen >= 0, key_tokens.segments.shape[-1], axis=-1)
    key_segments = keys(key_tokens.segments)
    mask = Mask(
        pattern,
        positions=queries(rows.positions),
        key_positions=keys(key_tokens.positions),
        segments=queries(rows.segments),
        key_segments=jnp.where(there.reshape(key_segments.shape), key_segments, 0),
    )
    flat = dense_mask(mask, rows.segments.shape[-1], key_segments.shape[-1])
    return flat.reshape(*shape[:3], *flat.shape[1:])

"""How blocks of keys are found and gathered for blocks of queries, step by step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.masks import Mask, Pattern, dense


class Marks(NamedTuple):
    """What the mask says of tokens, in blocks."""

    positions: jax.Array  # [B or 1, blocks, block]
    segments: jax.Array  # [B or 1, blocks, block]; 0: not there


class Step(NamedTuple):
    """What one step starts from; of all steps, with a first axis over them."""

    number: jax.Array  # []
    q: jax.Array  # [B, N, group, block, H]
    rows: Marks  # [B or 1, group, block]
    chosen: jax.Array  # [B or 1, N or 1, group, m]


def marks(mask: Mask, queries: int, keys: int) -> tuple[Marks, Marks]:  # [B or 1, T or S]
    """Of queries and of keys; those beyond the lengths are not there."""
    rows, columns = mask.places(queries, keys)
    ones = lambda size: jnp.ones((1, size), jnp.int32)  # noqa: E731
    own = ones(queries) if mask.segments is None else mask.segments
    theirs = own if mask.key_segments is None else mask.key_segments
    if mask.segments is None:
        theirs = ones(keys)
    if mask.lengths is not None:
        theirs = jnp.where(jnp.arange(keys)[None, :] < mask.lengths[:, None], theirs, 0)
    return Marks(rows, own), Marks(columns, theirs)


def cut(
    x: jax.Array,  # [B, T, ...]
    block: int,
    count: int = 0,  # of blocks; 0: as many as there are tokens for
) -> jax.Array:  # [B, blocks, block, ...]
    """In blocks, with zeros behind the last token."""
    count = count or -(-x.shape[1] // block)
    spare = [(0, 0)] * x.ndim
    spare[1] = (0, count * block - x.shape[1])
    return jnp.pad(x, spare).reshape(x.shape[0], count, block, *x.shape[2:])


def heads_first(x: jax.Array) -> jax.Array:  # [B, blocks, block, N, H] -> [B, N, blocks, block, H]
    """Heads before tokens, as products take them."""
    return jnp.moveaxis(x, 3, 1)


def in_steps(x: jax.Array, axis: int, steps: int) -> jax.Array:
    """The axis of blocks cut into steps, which come first."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], steps, -1, *x.shape[axis + 1 :]), axis, 0)


def places(
    blocks: jax.Array,  # [B, K, blocks, block, H]
    step: Step,
) -> tuple[jax.Array, ...]:  # [B, 1, 1, 1], [1, N, 1, 1], [B, N, group, m]
    """The index of each chosen block; one behind the last where none was."""
    batch, heads = step.q.shape[:2]
    example = jnp.arange(batch)[:, None, None, None]
    head = (jnp.arange(heads) // (heads // blocks.shape[1]))[None, :, None, None]
    found = jnp.where(step.chosen < 0, blocks.shape[2], step.chosen)
    return example, head, jnp.broadcast_to(found, (batch, heads, *found.shape[2:]))


def gathered(blocks: jax.Array, step: Step) -> jax.Array:  # [B, N, group, m block, H]
    """The chosen blocks of keys or values side by side."""
    found = jnp.asarray(blocks).at[places(blocks, step)].get(mode="clip")
    return found.reshape(*found.shape[:3], -1, found.shape[-1])


def shown(
    pattern: Pattern, step: Step, columns: Marks
) -> jax.Array:  # [B or 1, N or 1, group, block, m block]
    """Which of the gathered keys each query sees."""
    rows, chosen = step.rows, step.chosen
    batch = max(len(rows.segments), len(columns.segments), len(rows.positions), len(chosen))
    shape = (batch, *chosen.shape[1:])
    chosen = jnp.broadcast_to(chosen, shape)
    example = jnp.arange(batch)[:, None, None, None]

    def queries(x: jax.Array) -> jax.Array:  # [B or 1, group, block] -> [all, block]
        return jnp.broadcast_to(x[:, None], (*shape[:3], x.shape[-1])).reshape(-1, x.shape[-1])

    def keys(x: jax.Array) -> jax.Array:  # [B or 1, blocks, block] -> [all, m block]
        here = x[example if len(x) > 1 else 0, jnp.maximum(chosen, 0)]
        return here.reshape(-1, shape[3] * x.shape[-1])

    there = jnp.repeat(chosen >= 0, columns.segments.shape[-1], axis=-1)
    key_segments = keys(columns.segments)
    mask = Mask(
        pattern,
        positions=queries(rows.positions),
        key_positions=keys(columns.positions),
        segments=queries(rows.segments),
        key_segments=jnp.where(there.reshape(key_segments.shape), key_segments, 0),
    )
    flat = dense(mask, rows.segments.shape[-1], key_segments.shape[-1])
    return flat.reshape(*shape[:3], *flat.shape[1:])

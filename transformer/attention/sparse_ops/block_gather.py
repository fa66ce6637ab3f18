"""Attention of each block of queries over selected blocks of keys.

The selected blocks are gathered for a few blocks of queries (a step) at a time, forward and
backward. Memory is O(T): the backward pass saves only the inputs of each step.

Letters in shapes: `group` blocks of queries per step, `m` selected blocks of keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention.backends.blockwise import PartialAttention
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.score_spec import ScoreSpec
from transformer.attention.sparse_ops.top_k_keys import softmax_where
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum


class BlockTokens(NamedTuple):
    """Positions and segments of tokens, cut into blocks."""

    positions: jax.Array  # [B or 1, blocks, block]
    segments: jax.Array  # [B or 1, blocks, block]; 0: not there


class GatherStep(NamedTuple):
    """Inputs of one step. The inputs of all steps are stacked along a leading axis."""

    step_index: jax.Array  # []
    q: jax.Array  # [B, N, group, block, H]
    query_tokens: BlockTokens  # [B or 1, group, block]
    selected: jax.Array  # [B or 1, N or 1, group, m]


def query_and_key_tokens(
    mask: Mask, num_queries: int, num_keys: int
) -> tuple[BlockTokens, BlockTokens]:  # [B or 1, T or S]
    """Return positions and segments of queries and keys; keys beyond the lengths get segment 0."""
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
    """Cut the tokens into blocks; pad the last block with zeros."""
    num_blocks = num_blocks or -(-x.shape[1] // block_size)
    spare = [(0, 0)] * x.ndim
    spare[1] = (0, num_blocks * block_size - x.shape[1])
    return jnp.pad(x, spare).reshape(x.shape[0], num_blocks, block_size, *x.shape[2:])


def heads_first(x: jax.Array) -> jax.Array:  # [B, blocks, block, N, H] -> [B, N, blocks, block, H]
    """Move the heads before the tokens, as matmuls expect them."""
    return jnp.moveaxis(x, 3, 1)


def split_steps(x: jax.Array, axis: int, num_steps: int) -> jax.Array:
    """Cut the block axis into steps and move the step axis to the front."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_steps, -1, *x.shape[axis + 1 :]), axis, 0)


def block_indices(
    blocks: jax.Array,  # [B, K, blocks, block, H]
    step: GatherStep,
) -> tuple[jax.Array, ...]:  # [B, 1, 1, 1], [1, N, 1, 1], [B, N, group, m]
    """Return the index of each selected block; an index past the end means no block."""
    batch, heads = step.q.shape[:2]
    example = jnp.arange(batch)[:, None, None, None]
    head = (jnp.arange(heads) // (heads // blocks.shape[1]))[None, :, None, None]
    found = jnp.where(step.selected < 0, blocks.shape[2], step.selected)
    return example, head, jnp.broadcast_to(found, (batch, heads, *found.shape[2:]))


def gather_blocks(blocks: jax.Array, step: GatherStep) -> jax.Array:  # [B, N, group, m block, H]
    """Gather the selected blocks of keys or values and concatenate their tokens."""
    found = jnp.asarray(blocks).at[block_indices(blocks, step)].get(mode="clip")
    return found.reshape(*found.shape[:3], -1, found.shape[-1])


def gathered_mask(
    pattern: MaskPattern, step: GatherStep, key_tokens: BlockTokens
) -> jax.Array:  # [B or 1, N or 1, group, block, m block]
    """Return which of the gathered keys each query may see."""
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


QUERIES_PER_STEP = 128
"""Target number of queries per step. A step has at least one block."""


def attend_selected_blocks(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: ScoreSpec,
    selected: jax.Array,  # [B or 1, N or 1, blocks of queries, m] blocks of keys; -1: none
    block_size: int,  # tokens of a block
    query_block_size: int = 0,  # queries of a block, if not as many
) -> PartialAttention:
    """Compute one softmax over the visible keys of the selected blocks.

    Queries must not select the same block twice: its keys would count twice.

    Raises:
      ValueError: the scores are more than dot products, or the mask has more than a pattern,
        segments and lengths.
    """
    if not scoring.dot_product_only:
        raise ValueError("chosen blocks: have scores of products alone; leave out biases and caps")
    if any(
        array is not None for array in (mask.prefix_lengths, mask.global_positions, mask.allowed)
    ):
        raise ValueError("chosen blocks: obey no prefix, globals or array; choose blocks by them")
    queries, blocks, size = q.shape[1], selected.shape[2], query_block_size or block_size
    group = min(max(1, QUERIES_PER_STEP // block_size), blocks)
    steps = -(-blocks // group)
    theirs, columns = query_and_key_tokens(mask, queries, k.shape[1])
    spare = ((0, 0), (0, 0), (0, steps * group - blocks), (0, 0))
    stepped = functools.partial(split_steps, num_steps=steps)
    given = GatherStep(
        jnp.arange(steps),
        stepped(heads_first(split_blocks(q, size, steps * group)), axis=2),
        BlockTokens(*(stepped(split_blocks(each, size, steps * group), axis=1) for each in theirs)),
        stepped(jnp.pad(selected, spare, constant_values=-1), axis=2),
    )
    k, v = (heads_first(split_blocks(each, block_size)) for each in (k, v))
    columns = BlockTokens(*(split_blocks(each, block_size) for each in columns))
    operands = scoring.operand_dtype_of(q)
    how = _How(mask.pattern, scoring.scale, scoring.softmax_dtype, scoring.dropout_rate, operands)
    y, lse = _chosen(how, k, v, given, columns, scoring.dropout_rngs)
    y = jnp.moveaxis(y, 0, 2).reshape(*q.shape[:1], q.shape[2], -1, v.shape[-1])
    lse = jnp.moveaxis(lse, 0, 2).reshape(*y.shape[:3])
    return PartialAttention(y[:, :, :queries].swapaxes(1, 2), lse[:, :, :queries])


class _How(NamedTuple):
    """Static settings of a pass (hashable: `custom_vjp` requires it)."""

    pattern: MaskPattern
    scale: float
    softmax_dtype: str
    rate: float
    operands: str

    @property
    def sums(self) -> Any:
        """Accumulation dtype of the matmuls."""
        return accumulation_dtype(self.operands, self.softmax_dtype)


def _look(
    how: _How,
    q: jax.Array,  # [B, N, group, block, H]
    k: jax.Array,  # [B, N, group, m block, H]
    v: jax.Array,  # [B, N, group, m block, H of values]
    seen: jax.Array,  # [B or 1, N or 1, group, block, m block]
    dropout_rngs: jax.Array | None,  # [B]
) -> tuple[jax.Array, jax.Array]:  # [B, N, group, block, H of values], [B, N, group, block]
    """Return the softmax attention of one step and the log-sum-exp of its scores."""
    scores = precise_einsum("...TH,...SH->...TS", q, k, how.operands, how.sums)
    # Weights are divided by their sum before they meet the values: divided after, the gradients of
    # the two would not cancel, as one is rounded on its way through the product.
    weights, lse = softmax_where(scores.astype(how.softmax_dtype) * how.scale, seen)
    dropped = dropout(weights, how.rate, dropout_rngs).astype(how.sums)
    return precise_einsum("...TS,...SH->...TH", dropped, v, how.operands, how.sums), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chosen(
    how: _How,
    k: jax.Array,  # [B, K, blocks, block, H]
    v: jax.Array,  # [B, K, blocks, block, H of values]
    steps: GatherStep,
    columns: BlockTokens,
    dropout_rngs: jax.Array | None,
) -> Any:
    def one(step: GatherStep) -> Any:
        seen, here = (
            gathered_mask(how.pattern, step, columns),
            fold_in(dropout_rngs, step.step_index),
        )
        y, lse = _look(how, step.q, gather_blocks(k, step), gather_blocks(v, step), seen, here)
        return y.astype(v.dtype), lse

    return jax.lax.map(one, steps)


def _forward(how: _How, *given: Any) -> Any:
    return _chosen(how, *given), given


def _backward(how: _How, given: Any, cotangents: Any) -> Any:
    """Recompute each step and scatter-add its key and value gradients to their blocks.

    A block may be selected by many steps, so gradients accumulate in a carry of the full size.
    """
    k, v, steps, columns, dropout_rngs = given

    def one(carry: Any, inputs: Any) -> Any:
        step, cotangent = inputs
        seen, here = (
            gathered_mask(how.pattern, step, columns),
            fold_in(dropout_rngs, step.step_index),
        )
        look = functools.partial(_look, how, seen=seen, dropout_rngs=here)
        given = (step.q, gather_blocks(k, step), gather_blocks(v, step))
        _, pull = jax.vjp(look, *(each.astype(how.sums) for each in given))
        d_y, d_lse = cotangent
        dq, *found = pull((d_y.astype(how.sums), d_lse))

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(*new.shape[:3], -1, *total.shape[3:])
            return total.at[block_indices(total, step)].add(new.astype(total.dtype), mode="drop")

        return tuple(add(*both) for both in zip(carry, found, strict=True)), dq.astype(step.q.dtype)

    start = tuple(jnp.zeros(each.shape, how.sums) for each in (k, v))
    (dk, dv), dq = jax.lax.scan(one, start, (steps, cotangents))
    nothing: Any = None  # for what is no real number
    d_steps = GatherStep(nothing, dq, nothing, nothing)
    return dk.astype(k.dtype), dv.astype(v.dtype), d_steps, nothing, nothing


_chosen.defvjp(_forward, _backward)

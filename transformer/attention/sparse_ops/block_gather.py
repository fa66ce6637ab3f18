"""Attention of each block of queries over selected blocks of keys.

The selected blocks are gathered for a few blocks of queries (a step) at a time, forward and
backward. Memory is O(T): the backward pass saves only the inputs of each step.

Letters in shapes: `group` blocks of queries per step, `m` selected blocks of keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from transformer.attention.backends.partial import PartialAttention
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.mask_tokens import Tokens, query_and_key_tokens
from transformer.attention.sparse_ops.query_blocks import softmax_where
from transformer.layers.basic import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum


class GatherStep(NamedTuple):
    """Inputs of one step. The inputs of all steps are stacked along a leading axis."""

    step_index: Int[Array, ""]
    q: Float[Array, "B N group block H"]
    query_tokens: Tokens  # [B or 1, group, block]
    selected: Int[Array, "#B #N group m"]


def split_blocks(
    x: Shaped[Array, "B T ..."],
    block_size: int,
    num_blocks: int = 0,  # 0: as many as the tokens fill
) -> Shaped[Array, "B blocks block ..."]:
    """Cut the tokens into blocks; pad the last block with zeros."""
    num_blocks = num_blocks or -(-x.shape[1] // block_size)
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, num_blocks * block_size - x.shape[1])
    return jnp.pad(x, padding).reshape(x.shape[0], num_blocks, block_size, *x.shape[2:])


def heads_first(x: Float[Array, "B blocks block N H"]) -> Float[Array, "B N blocks block H"]:
    """Move the heads before the tokens, as matmuls expect them."""
    return jnp.moveaxis(x, 3, 1)


def split_steps(x: jax.Array, axis: int, num_steps: int) -> jax.Array:
    """Cut the block axis into steps and move the step axis to the front."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], num_steps, -1, *x.shape[axis + 1 :]), axis, 0)


def block_indices(
    blocks: Shaped[Array, "B K blocks block H"],
    step: GatherStep,
) -> tuple[Int[Array, "B 1 1 1"], Int[Array, "1 N 1 1"], Int[Array, "B N group m"]]:
    """Return the index of each selected block; an index past the end means no block."""
    batch, heads = step.q.shape[:2]
    example = jnp.arange(batch)[:, None, None, None]
    # Query head n reads key head n // G, without a copy of the keys for each query head.
    head = (jnp.arange(heads) // (heads // blocks.shape[1]))[None, :, None, None]
    # Out of bounds on purpose: gathers clip this index (the mask hides the result) and scatters
    # drop it.
    index = jnp.where(step.selected < 0, blocks.shape[2], step.selected)
    return example, head, jnp.broadcast_to(index, (batch, heads, *index.shape[2:]))


def gather_blocks(blocks: jax.Array, step: GatherStep) -> Float[Array, "B N group m_block H"]:
    """Gather the selected blocks of keys or values and concatenate their tokens."""
    gathered = jnp.asarray(blocks).at[block_indices(blocks, step)].get(mode="clip")
    return gathered.reshape(*gathered.shape[:3], -1, gathered.shape[-1])


def gathered_mask(
    pattern: MaskPattern,
    step: GatherStep,
    key_tokens: Tokens,  # [B or 1, blocks, block]
) -> Bool[Array, "#B #N group block m_block"]:
    """Return which of the gathered keys each query may see."""
    # Gather positions and segments of the selected keys, then reuse the dense mask on the small
    # [block, m block] problem of each block of queries.
    query_tokens, selected = step.query_tokens, step.selected
    # Any of the four may have one row for all examples.
    batch = max(
        len(query_tokens.segments),
        len(key_tokens.segments),
        len(query_tokens.positions),
        len(selected),
    )
    shape = (batch, *selected.shape[1:])
    selected = jnp.broadcast_to(selected, shape)
    example = jnp.arange(batch)[:, None, None, None]

    def expand_queries(x: Int[Array, "#B group block"]) -> Int[Array, "all block"]:
        return jnp.broadcast_to(x[:, None], (*shape[:3], x.shape[-1])).reshape(-1, x.shape[-1])

    def gather_keys(x: Int[Array, "#B blocks block"]) -> Int[Array, "all m_block"]:
        # One row serves all examples: an index of examples would run past it.
        gathered = x[example if len(x) > 1 else 0, jnp.maximum(selected, 0)]
        return gathered.reshape(-1, shape[3] * x.shape[-1])

    # The gather below reads block 0 in place of an absent one; segment 0 hides what it has read.
    exists = jnp.repeat(selected >= 0, key_tokens.segments.shape[-1], axis=-1)
    key_segments = gather_keys(key_tokens.segments)
    mask = Mask(
        pattern,
        positions=expand_queries(query_tokens.positions),
        key_positions=gather_keys(key_tokens.positions),
        segments=expand_queries(query_tokens.segments),
        key_segments=jnp.where(exists.reshape(key_segments.shape), key_segments, 0),
    )
    visible = dense_mask(mask, query_tokens.segments.shape[-1], key_segments.shape[-1])
    return visible.reshape(*shape[:3], *visible.shape[1:])


QUERIES_PER_STEP = 128
"""Target number of queries per step. A step has at least one block."""


def attend_selected_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,  # a pattern, segments and lengths
    score_spec: ScoreSpec,  # of dot products
    selected: Int[Array, "#B #N query_blocks m"],  # blocks of keys; -1: none
    block_size: int,  # tokens of a block
    query_block_size: int = 0,  # queries of a block, if not as many
) -> PartialAttention:
    """Compute one softmax over the visible keys of the selected blocks.

    Queries must not select the same block twice: its keys would count twice.
    """
    num_queries, num_blocks = q.shape[1], selected.shape[2]
    query_block_size = query_block_size or block_size
    # Several blocks in a step make larger products and fewer iterations; more than that would only
    # raise the memory of the gathered keys, m blocks for each block of queries.
    blocks_per_step = min(max(1, QUERIES_PER_STEP // block_size), num_blocks)
    num_steps = -(-num_blocks // blocks_per_step)
    padded_blocks = num_steps * blocks_per_step
    query_tokens, key_tokens = query_and_key_tokens(mask, num_queries, k.shape[1])
    # Steps have equal shapes. Blocks that fill up the last one select nothing and are cut off
    # below.
    padding = ((0, 0), (0, 0), (0, padded_blocks - num_blocks), (0, 0))
    selected = jnp.pad(selected, padding, constant_values=-1)

    def split_query_tokens(x: Int[Array, "B T"]) -> Int[Array, "steps B group block"]:
        return split_steps(split_blocks(x, query_block_size, padded_blocks), 1, num_steps)

    # Stack the inputs of all steps: `lax.map` and `lax.scan` then slice one step at a time.
    q_blocks = heads_first(split_blocks(q, query_block_size, padded_blocks))
    steps = GatherStep(
        jnp.arange(num_steps),
        split_steps(q_blocks, 2, num_steps),
        Tokens(*map(split_query_tokens, query_tokens)),
        split_steps(selected, 2, num_steps),
    )
    # Whole blocks are gathered, not tokens: each index moves `block_size` consecutive rows.
    k_blocks, v_blocks = (heads_first(split_blocks(x, block_size)) for x in (k, v))
    key_tokens = Tokens(*(split_blocks(x, block_size) for x in key_tokens))
    dropout_rngs = score_spec.dropout_rngs
    # Without arrays the spec is hashable, as `custom_vjp` requires.
    score_spec = score_spec._replace(
        dropout_rngs=None, operand_dtype=score_spec.operand_dtype_of(q)
    )
    y, lse = _attend_steps(
        mask.pattern, score_spec, k_blocks, v_blocks, steps, key_tokens, dropout_rngs
    )
    # Back from steps to rows: [steps, B, N, group, block, H] -> [B, N, T padded, H].
    y = jnp.moveaxis(y, 0, 2).reshape(*q.shape[:1], q.shape[2], -1, v.shape[-1])
    lse = jnp.moveaxis(lse, 0, 2).reshape(*y.shape[:3])
    return PartialAttention(y[:, :, :num_queries].swapaxes(1, 2), lse[:, :, :num_queries])


def _sum_dtype(score_spec: ScoreSpec) -> jnp.dtype:
    return accumulation_dtype(score_spec.operand_dtype, score_spec.softmax_dtype)


def _attend_step(
    pattern: MaskPattern,
    score_spec: ScoreSpec,
    step: GatherStep,
    key_tokens: Tokens,
    dropout_rngs: Key[Array, "B"] | None,
    q: Float[Array, "B N group block H"],
    k: Float[Array, "B N group m_block H"],
    v: Float[Array, "B N group m_block Hv"],
) -> tuple[Float[Array, "B N group block Hv"], Float[Array, "B N group block"]]:
    """Return the softmax attention of one step and the log-sum-exp of its scores."""
    operand_dtype, sum_dtype = score_spec.operand_dtype, _sum_dtype(score_spec)
    visible = gathered_mask(pattern, step, key_tokens)
    scores = precise_einsum("...TH,...SH->...TS", q, k, operand_dtype, sum_dtype)
    scores = scores.astype(score_spec.softmax_dtype) * score_spec.scale
    weights, lse = softmax_where(scores, visible)
    step_rngs = fold_in(dropout_rngs, step.step_index)
    weights = dropout(weights, score_spec.dropout_rate, step_rngs).astype(sum_dtype)
    return precise_einsum("...TS,...SH->...TH", weights, v, operand_dtype, sum_dtype), lse


# A custom backward pass: differentiating `lax.map` would save the gathered keys and values of all
# steps, m times the memory of the keys themselves.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_steps(
    pattern: MaskPattern,
    score_spec: ScoreSpec,
    k: Float[Array, "B K blocks block H"],
    v: Float[Array, "B K blocks block Hv"],
    steps: GatherStep,
    key_tokens: Tokens,
    dropout_rngs: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # as of `_attend_step`, with an axis of steps in front
    def attend(step: GatherStep) -> tuple[jax.Array, jax.Array]:
        qkv = step.q, gather_blocks(k, step), gather_blocks(v, step)
        y, lse = _attend_step(pattern, score_spec, step, key_tokens, dropout_rngs, *qkv)
        # Rounded within the step: its queries are no other step's, so nothing is added to y.
        return y.astype(v.dtype), lse

    # `map` runs one step after the other: the gathered keys of one step are in memory at a time.
    return jax.lax.map(attend, steps)


# The residuals are the inputs alone. Every step is recomputed.
def _forward(pattern: MaskPattern, score_spec: ScoreSpec, *residuals: Any) -> Any:
    return _attend_steps(pattern, score_spec, *residuals), residuals


def _backward(pattern: MaskPattern, score_spec: ScoreSpec, residuals: Any, cotangents: Any) -> Any:
    """Recompute each step and scatter-add its key and value gradients to their blocks.

    A block may be selected by many steps, so gradients accumulate in a carry of the full size.
    """
    k, v, steps, key_tokens, dropout_rngs = residuals
    sum_dtype = _sum_dtype(score_spec)

    def add(
        total: Float[Array, "B K blocks block H"],
        gathered: Float[Array, "B N group m_block H"],
        step: GatherStep,
    ) -> jax.Array:
        gathered = gathered.reshape(*gathered.shape[:3], -1, *total.shape[3:])
        # Several steps may select the same block: add, and drop the index of absent blocks.
        return total.at[block_indices(total, step)].add(gathered.astype(total.dtype), mode="drop")

    def step_backward(carry: Any, inputs: Any) -> Any:
        dk, dv = carry
        step, (d_y, d_lse) = inputs
        # Mask and random keys are computed again from the same inputs, so they are those of the
        # forward pass: the same weights are dropped.
        attend = functools.partial(
            _attend_step, pattern, score_spec, step, key_tokens, dropout_rngs
        )
        qkv = step.q, gather_blocks(k, step), gather_blocks(v, step)
        # Only the loop is differentiated by hand; JAX differentiates a step. Cast before, because a
        # gradient has the dtype of its argument: these are rounded once, after the sum over steps.
        _, step_vjp = jax.vjp(attend, *(x.astype(sum_dtype) for x in qkv))
        # lse is a result as well: who merges it with that of other keys gives it a gradient.
        step_dq, step_dk, step_dv = step_vjp((d_y.astype(sum_dtype), d_lse))
        return (add(dk, step_dk, step), add(dv, step_dv, step)), step_dq.astype(step.q.dtype)

    # A popular block gets a term from nearly every step: a 16-bit sum would stop growing.
    zeros = jnp.zeros(k.shape, sum_dtype), jnp.zeros(v.shape, sum_dtype)
    (dk, dv), dq = jax.lax.scan(step_backward, zeros, (steps, cotangents))
    no_gradient: Any = None  # cotangent of integer arrays
    d_steps = GatherStep(no_gradient, dq, no_gradient, no_gradient)
    return dk.astype(k.dtype), dv.astype(v.dtype), d_steps, no_gradient, no_gradient


_attend_steps.defvjp(_forward, _backward)

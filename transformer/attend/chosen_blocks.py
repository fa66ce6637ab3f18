"""Attention of each block of queries over the blocks of keys that were chosen for it.

What is chosen is gathered for a few blocks of queries at a time, one step after the other, forward
and backward: memory is O(T), and no step is remembered but by its inputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import Looked
from transformer.attend.scoring import Scoring
from transformer.dropout import dropout, fold
from transformer.masks import Mask, Pattern, dense

ROWS = 128
"""Queries of a step, if a block has no more."""


def attend_chosen_blocks(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: Scoring,
    chosen: jax.Array,  # [B or 1, N or 1, blocks of queries, m] blocks of keys; -1: none
    block: int,  # tokens of a block
) -> Looked:
    """One softmax over the keys in the chosen blocks, as far as the mask shows them.

    No block may be chosen twice for the same queries. Raises ValueError for scores that are more
    than products, and for a mask that is more than a pattern, segments and lengths.
    """
    if not scoring.plain:
        raise ValueError("chosen blocks: have scores of products alone; leave out biases and caps")
    if any(array is not None for array in (mask.prefix, mask.globals, mask.allowed)):
        raise ValueError("chosen blocks: obey no prefix, globals or array; choose blocks by them")
    queries, blocks = q.shape[1], chosen.shape[2]
    group = min(max(1, ROWS // block), blocks)
    steps = -(-blocks // group)
    rows, columns = _marks(mask, queries, k.shape[1])
    spare = ((0, 0), (0, 0), (0, steps * group - blocks), (0, 0))
    in_steps = functools.partial(_in_steps, steps=steps)
    given = _Step(
        jnp.arange(steps),
        in_steps(_heads_first(_cut(q, block, steps * group)), axis=2),
        _Marks(*(in_steps(_cut(each, block, steps * group), axis=1) for each in rows)),
        in_steps(jnp.pad(chosen, spare, constant_values=-1), axis=2),
    )
    k, v = (_heads_first(_cut(each, block)) for each in (k, v))
    columns = _Marks(*(_cut(each, block) for each in columns))
    how = _How(mask.pattern, scoring.scale, scoring.softmax_dtype, scoring.rate)
    y, lse = _chosen(how, k, v, given, columns, scoring.keys)
    y = jnp.moveaxis(y, 0, 2).reshape(*q.shape[:1], q.shape[2], -1, v.shape[-1])
    lse = jnp.moveaxis(lse, 0, 2).reshape(*y.shape[:3])
    return Looked(y[:, :, :queries].swapaxes(1, 2), lse[:, :, :queries])


class _How(NamedTuple):
    """What a pass does; hashable."""

    pattern: Pattern
    scale: float
    softmax_dtype: str
    rate: float


class _Marks(NamedTuple):
    """What the mask says of tokens, in blocks."""

    positions: jax.Array  # [B or 1, blocks, block]
    segments: jax.Array  # [B or 1, blocks, block]; 0: not there


class _Step(NamedTuple):
    """What one step starts from; of all steps, with a first axis over them."""

    number: jax.Array  # []
    q: jax.Array  # [B, N, group, block, H]
    rows: _Marks  # [B or 1, group, block]
    chosen: jax.Array  # [B or 1, N or 1, group, m]


def _marks(mask: Mask, queries: int, keys: int) -> tuple[_Marks, _Marks]:  # [B or 1, T or S]
    """Of queries and of keys; those beyond the lengths are not there."""
    rows, columns = mask.places(queries, keys)
    ones = lambda size: jnp.ones((1, size), jnp.int32)  # noqa: E731
    own = ones(queries) if mask.segments is None else mask.segments
    theirs = own if mask.key_segments is None else mask.key_segments
    if mask.segments is None:
        theirs = ones(keys)
    if mask.lengths is not None:
        theirs = jnp.where(jnp.arange(keys)[None, :] < mask.lengths[:, None], theirs, 0)
    return _Marks(rows, own), _Marks(columns, theirs)


def _cut(
    x: jax.Array,  # [B, T, ...]
    block: int,
    count: int = 0,  # of blocks; 0: as many as there are tokens for
) -> jax.Array:  # [B, blocks, block, ...]
    count = count or -(-x.shape[1] // block)
    spare = [(0, 0)] * x.ndim
    spare[1] = (0, count * block - x.shape[1])
    return jnp.pad(x, spare).reshape(x.shape[0], count, block, *x.shape[2:])


def _heads_first(x: jax.Array) -> jax.Array:  # [B, blocks, block, N, H] -> [B, N, blocks, block, H]
    return jnp.moveaxis(x, 3, 1)


def _in_steps(x: jax.Array, axis: int, steps: int) -> jax.Array:
    """The axis of blocks cut into steps, which come first."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], steps, -1, *x.shape[axis + 1 :]), axis, 0)


def _places(
    blocks: jax.Array,  # [B, K, blocks, block, H]
    step: _Step,
) -> tuple[jax.Array, ...]:  # [B, 1, 1, 1], [1, N, 1, 1], [B, N, group, m]
    """The index of each chosen block; one behind the last where none was."""
    batch, heads = step.q.shape[:2]
    example = jnp.arange(batch)[:, None, None, None]
    head = (jnp.arange(heads) // (heads // blocks.shape[1]))[None, :, None, None]
    found = jnp.where(step.chosen < 0, blocks.shape[2], step.chosen)
    return example, head, jnp.broadcast_to(found, (batch, heads, *found.shape[2:]))


def _gathered(blocks: jax.Array, step: _Step) -> jax.Array:  # [B, N, group, m block, H]
    """The chosen blocks of keys or values side by side."""
    found = blocks.at[_places(blocks, step)].get(mode="clip")
    return found.reshape(*found.shape[:3], -1, found.shape[-1])


def _seen(
    how: _How, step: _Step, columns: _Marks
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
        how.pattern,
        positions=queries(rows.positions),
        key_positions=keys(columns.positions),
        segments=queries(rows.segments),
        key_segments=jnp.where(there.reshape(key_segments.shape), key_segments, 0),
    )
    flat = dense(mask, rows.segments.shape[-1], key_segments.shape[-1])
    return flat.reshape(*shape[:3], *flat.shape[1:])


def _look(
    how: _How,
    q: jax.Array,  # [B, N, group, block, H]
    k: jax.Array,  # [B, N, group, m block, H]
    v: jax.Array,  # [B, N, group, m block, H of values]
    seen: jax.Array,  # [B or 1, N or 1, group, block, m block]
    keys: jax.Array | None,  # [B]
) -> tuple[jax.Array, jax.Array]:  # [B, N, group, block, H of values], [B, N, group, block]
    """Softmax attention, and the logarithm of the softmax's sum."""
    scores = jnp.einsum("...TH,...SH->...TS", q * how.scale, k).astype(how.softmax_dtype)
    scores = jnp.where(seen, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    raised = jnp.exp(scores - largest[..., None])
    total = raised.sum(-1)
    some = total > 0
    total = jnp.where(some, total, 1)
    y = jnp.einsum("...TS,...SH->...TH", dropout(raised, how.rate, keys).astype(v.dtype), v)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)
    return (y / total[..., None].astype(y.dtype)), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chosen(
    how: _How,
    k: jax.Array,  # [B, K, blocks, block, H]
    v: jax.Array,  # [B, K, blocks, block, H of values]
    steps: _Step,
    columns: _Marks,
    keys: jax.Array | None,
) -> Any:
    def one(step: _Step) -> Any:
        seen, here = _seen(how, step, columns), fold(keys, step.number)
        return _look(how, step.q, _gathered(k, step), _gathered(v, step), seen, here)

    return jax.lax.map(one, steps)


def _forward(how: _How, *given: Any) -> Any:
    return _chosen(how, *given), given


def _backward(how: _How, given: Any, cotangents: Any) -> Any:
    """Each step again, its gradients added where its keys and values came from."""
    k, v, steps, columns, keys = given

    def one(carry: Any, inputs: Any) -> Any:
        step, cotangent = inputs
        seen, here = _seen(how, step, columns), fold(keys, step.number)
        look = functools.partial(_look, how, seen=seen, keys=here)
        _, pull = jax.vjp(look, step.q, _gathered(k, step), _gathered(v, step))
        dq, *found = pull(cotangent)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(*new.shape[:3], -1, *total.shape[3:])
            return total.at[_places(total, step)].add(new.astype(total.dtype), mode="drop")

        return tuple(add(*both) for both in zip(carry, found, strict=True)), dq

    start = tuple(jnp.zeros(each.shape, how.softmax_dtype) for each in (k, v))
    (dk, dv), dq = jax.lax.scan(one, start, (steps, cotangents))
    return dk.astype(k.dtype), dv.astype(v.dtype), _Step(None, dq, None, None), None, None


_chosen.defvjp(_forward, _backward)

"""Global tokens: all tokens attend to them and they attend to all tokens of their document.

Global tokens are listed by position in their document. If each row holds one document, they are
gathered once for all queries. In packed rows each document has its own global tokens: for each
listed position, every token finds the global token of its document by its distance in positions,
since positions of a document count up by one. Both cost O(n T) for n global positions.

Sums over a document, also in gradients, accumulate in the dtype of the softmax: in bfloat16 a sum
of thousands of terms stops growing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention.backends.blockwise import PartialAttention, attend_blockwise
from transformer.attention.masks import Mask
from transformer.attention.score_spec import ScoreSpec
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum


def gather_tokens(
    x: jax.Array,  # [B, T, ...] or [1, T, ...]
    index: jax.Array,  # [B or 1, n]; T: none, which takes the last
) -> jax.Array:  # [B or 1, n, ...]
    """Gather the tokens at `index` of each example."""
    batch = max(len(x), len(index))
    row = jnp.arange(batch)[:, None]
    here = jnp.broadcast_to(jnp.minimum(index, x.shape[1] - 1), (batch, index.shape[1]))
    return jnp.asarray(x)[row if len(x) > 1 else jnp.zeros_like(row), here]


def attend_from_tokens(
    q: jax.Array,  # [B, n, N, H] of those few
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # of self attention over T tokens
    scoring: ScoreSpec,
    index: jax.Array,  # [B or 1, n] where they stand; T: nowhere
) -> jax.Array:  # [B, n, N, H of values]
    """Attend from the queries at `index` to all visible keys. Cost O(n T)."""
    length = k.shape[1]
    positions, theirs = mask.resolved_positions(length, length)
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    keys_of = segments if mask.key_segments is None else mask.key_segments
    theirs_alone = mask.replace(
        positions=gather_tokens(positions, index),
        segments=jnp.where(index < length, gather_tokens(segments, index), 0),
    )
    return attend_blockwise(q, k, v, theirs_alone.with_keys(theirs, keys_of), scoring).y


def scatter_tokens(
    y: jax.Array,  # [B, T, ...]
    updates: jax.Array,  # [B, n, ...]
    index: jax.Array,  # [B or 1, n]; T: nowhere
) -> jax.Array:  # [B, T, ...]
    """Return `y` with the tokens at `index` replaced by `updates`."""
    places = jnp.broadcast_to(index, updates.shape[:2])
    return y.at[jnp.arange(len(y))[:, None], places].set(updates, mode="drop")


def mask_duplicates(
    global_positions: jax.Array,  # [B or 1, n] positions; -1: none
) -> jax.Array:  # [B or 1, n]
    """Replace repeated positions by -1, so that no key is counted twice."""
    same = global_positions[:, :, None] == global_positions[:, None, :]
    before = jnp.tri(global_positions.shape[1], k=-1, dtype=bool)[None]
    return jnp.where((same & before).any(-1), -1, global_positions)


def is_global_token(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, T] booleans
    """Return which tokens are global. Padding is not."""
    positions: Any = mask.positions
    found = (positions[:, :, None] == global_positions[:, None, :]).any(-1)
    return found & (mask.key_segments != 0)


def has_single_document_rows(
    mask: Mask,  # with key_segments [B or 1, T]
) -> jax.Array:  # [] boolean
    """Return True if no row contains more than one document. Padding may be anywhere."""
    segments: Any = mask.key_segments
    return jnp.all((segments == segments.max(axis=1, keepdims=True)) | (segments == 0))


def as_single_document(
    mask: Mask,  # with key_segments [B or 1, T], of one document
) -> Mask:
    """Return the mask with every document renumbered to 1, as `attend_to_globals` requires."""
    segments: Any = mask.key_segments
    there = (segments != 0).astype(jnp.int32)
    return mask.replace(segments=there, key_segments=there)


def find_global_tokens(
    mask: Mask,  # with positions and key_segments [B or 1, T], of one document
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, n]
    """Return the row index of the token at each listed position; T if there is none."""
    positions: Any = mask.positions
    places = jnp.where(mask.key_segments != 0, positions, -1)
    found = (places[:, None, :] == global_positions[:, :, None]) & (global_positions >= 0)[
        :, :, None
    ]
    return jnp.where(found.any(-1), found.argmax(-1), positions.shape[1])


def attend_to_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # with positions and segments [B or 1, T]
    scoring: ScoreSpec,
    index: jax.Array,  # [B or 1, n]; T: none
) -> PartialAttention:
    """Attend from all queries to the global keys only. Cost O(n T)."""
    there = (index < q.shape[1]).astype(jnp.int32)
    positions: Any = mask.positions
    theirs = mask.with_keys(gather_tokens(positions, index), there)
    return attend_blockwise(q, gather_tokens(k, index), gather_tokens(v, index), theirs, scoring)


class _Found(NamedTuple):
    """Global token at one position of each token's document."""

    place: jax.Array  # [B or 1, T] where it stands
    there: jax.Array  # [B or 1, T] booleans: whether there is one
    ahead: jax.Array  # [B or 1, T] how many positions it is ahead of the token


def _find(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    position: jax.Array,  # [B or 1]
) -> _Found:
    positions: Any = mask.positions
    segments: Any = mask.key_segments
    length = positions.shape[1]
    ahead = position[:, None] - positions
    index = jnp.arange(length)[None, :] + ahead
    there = (index >= 0) & (index < length) & (position >= 0)[:, None] & (segments != 0)
    index = jnp.clip(index, 0, length - 1)
    there &= gather_tokens(segments, index) == segments
    there &= gather_tokens(positions, index) == position[:, None]
    return _Found(index, there, ahead)


def attend_to_packed_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal or not; with positions and key_segments [B or 1, T]
    scoring: ScoreSpec,
    global_positions: jax.Array,  # [B or 1, n] distinct positions; -1: none
) -> PartialAttention:
    """Attend from all queries to the global keys of their own document."""
    dtype, operands = v.dtype, scoring.operand_dtype_of(q)
    sums = accumulation_dtype(operands, scoring.softmax_dtype)
    grouped = _grouped(q, k).astype(sums)
    keys, values = (each.astype(sums) for each in (k, v))

    @jax.checkpoint
    def score(position: jax.Array) -> jax.Array:  # [B, T, K, G]
        found = _find(mask, position)
        seen = found.there & (found.ahead <= 0) if mask.pattern.causal else found.there
        there = gather_tokens(keys, found.place)
        scores = precise_einsum("BTKGH,BTKH->BTKG", grouped, there, operands, sums)
        scores = scores.astype(scoring.softmax_dtype) * scoring.scale
        return jnp.where(seen[..., None, None], scores, -jnp.inf)

    @jax.checkpoint
    def share(position: jax.Array, weights: jax.Array) -> jax.Array:  # [B, T, K, G, H of values]
        there = gather_tokens(values, _find(mask, position).place)
        return weights[..., None] * there[:, :, :, None]

    positions = global_positions.T
    scores = jax.lax.map(score, positions)  # [n, B, T, K, G]
    largest = _finite(jax.lax.stop_gradient(scores.max(0)))
    raised = jnp.exp(scores - largest[None])
    total = raised.sum(0)
    some = total > 0
    total = jnp.where(some, total, 1)
    weights = jnp.moveaxis(raised / total[None], 0, 1)
    weights = jnp.moveaxis(dropout(weights, scoring.dropout_rate, scoring.dropout_rngs), 1, 0)

    def add(y: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        return y + share(*inputs), None

    start = jnp.zeros((*grouped.shape[:-1], v.shape[-1]), values.dtype)
    y, _ = jax.lax.scan(add, start, (positions, weights))
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)
    heads = (*q.shape[:3], v.shape[-1])
    return PartialAttention(y.reshape(heads).astype(dtype), lse.reshape(heads[:3]).swapaxes(1, 2))


def attend_from_packed_globals(
    y: jax.Array,  # [B, T, N, H of values] of all queries
    q: jax.Array,  # [B, T, N, H]; those of global tokens are looked at
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal or not; with positions and key_segments [B or 1, T]
    scoring: ScoreSpec,
    global_positions: jax.Array,  # [B or 1, n] distinct positions; -1: none
) -> jax.Array:  # [B, T, N, H of values]
    """Return `y` with the rows of global tokens replaced by attention over their whole document."""
    batch, length = q.shape[:2]
    example = jnp.arange(batch)[:, None]
    operands = scoring.operand_dtype_of(q)
    sums = accumulation_dtype(operands, scoring.softmax_dtype)
    queries, keys, values = (each.astype(sums) for each in (q, k, v))

    @jax.checkpoint
    def look(position: jax.Array, number: jax.Array) -> jax.Array:  # [B, T, N, H of values]
        """Return the attention of each document's global token at `position`, in its own row."""
        found = _find(mask, position)
        seen = found.there & (found.ahead >= 0) if mask.pattern.causal else found.there
        index = jnp.broadcast_to(jnp.where(seen, found.place, length), (batch, length))

        def total(x: jax.Array) -> jax.Array:  # of each global token, at its place
            return jnp.zeros_like(x).at[example, index].add(x, mode="drop")

        theirs = _grouped(gather_tokens(queries, found.place), k)
        scores = precise_einsum("BTKGH,BTKH->BTKG", theirs, keys, operands, sums)
        scores = scores.astype(scoring.softmax_dtype) * scoring.scale
        scores = jnp.where(seen[..., None, None], scores, -jnp.inf)
        alone = jax.lax.stop_gradient(scores)
        largest = jnp.full_like(alone, -jnp.inf).at[example, index].max(alone, mode="drop")
        raised = jnp.exp(scores - _finite(gather_tokens(largest, found.place)))
        dropped = dropout(raised, scoring.dropout_rate, fold_in(scoring.dropout_rngs, number))
        totals = total(raised)
        rows = total(dropped[..., None] * values[:, :, :, None])
        rows = rows / jnp.where(totals > 0, totals, 1)[..., None]
        return rows.reshape(y.shape).astype(y.dtype)

    def put(y: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        position, number = inputs
        here = (mask.positions == position[:, None]) & (mask.key_segments != 0)
        return jnp.where(here[..., None, None], look(position, number), y), None

    return jax.lax.scan(put, y, (global_positions.T, jnp.arange(global_positions.shape[1])))[0]


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, T, K, G, H]
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)

"""Global tokens: all tokens attend to them and they attend to all tokens of their document.

Global tokens are listed by position in their document. If each row holds one document, they are
gathered once for all queries. In packed rows each document has its own global tokens: for each
listed position, every token finds the global token of its document by its distance in positions,
since positions of a document count up by one. Both cost O(n T) for n global positions.

Sums over a document, also in gradients, accumulate in the dtype of the softmax: in bfloat16 a sum
of thousands of terms stops growing.

`attend_with_absorbed_projections` is for few queries over all tokens: it multiplies the queries by
the projections of keys and values, so that neither keys nor values are computed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.attend import ScoreSpec
from transformer.attention.attention_config import MultiHeadConfig
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.tiling import PartialAttention
from transformer.attention.masks import Mask
from transformer.attention.projections import head_axes
from transformer.layers.basic import declare_linear, dropout, fold_in
from transformer.layers.low_rank import merge_weight
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum
from transformer.model_context import ModelContext


def gather_tokens(
    x: jax.Array,  # [B, T, ...] or [1, T, ...]
    index: jax.Array,  # [B or 1, n]; T: none, which takes the last
) -> jax.Array:  # [B or 1, n, ...]
    """Gather the tokens at `index` of each example."""
    batch = x.shape[0] if index.shape[0] == 1 else index.shape[0]
    row = jnp.arange(batch)[:, None]
    # Shapes are static, so absent tokens are gathered too: callers give them segment 0.
    clamped = jnp.broadcast_to(jnp.minimum(index, x.shape[1] - 1), (batch, index.shape[1]))
    return jnp.asarray(x)[row if x.shape[0] != 1 else jnp.zeros_like(row), clamped]


def attend_from_tokens(
    q: jax.Array,  # [B, n, N, H] of those few
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # of self attention over T tokens
    score_spec: ScoreSpec,
    index: jax.Array,  # [B or 1, n] where they stand; T: nowhere
) -> jax.Array:  # [B, n, N, H of values]
    """Attend from the queries at `index` to all visible keys. Cost O(n T)."""
    length = k.shape[1]
    positions, key_positions = mask.resolved_positions(length, length)
    segments = jnp.ones((1, length), jnp.int32) if mask.segments is None else mask.segments
    key_segments = segments if mask.key_segments is None else mask.key_segments
    # Queries of segment 0 see nothing: their results are zeros, which `scatter_tokens` drops.
    query_mask = mask.replace(
        positions=gather_tokens(positions, index),
        segments=jnp.where(index < length, gather_tokens(segments, index), 0),
    )
    return attend_blockwise(
        q, k, v, query_mask.with_keys(key_positions, key_segments), score_spec
    ).y


def scatter_tokens(
    y: jax.Array,  # [B, T, ...]
    updates: jax.Array,  # [B, n, ...]
    index: jax.Array,  # [B or 1, n]; T: nowhere
) -> jax.Array:  # [B, T, ...]
    """Return `y` with the tokens at `index` replaced by `updates`."""
    places = jnp.broadcast_to(index, updates.shape[:2])
    # mode="drop" skips index T.
    return y.at[jnp.arange(y.shape[0])[:, None], places].set(updates, mode="drop")


def mask_duplicates(
    global_positions: jax.Array,  # [B or 1, n] positions; -1: none
) -> jax.Array:  # [B or 1, n]
    """Replace repeated positions by -1, so that no key is counted twice."""
    same = global_positions[:, :, None] == global_positions[:, None, :]
    # Strictly below the diagonal: the first of equal positions stays.
    before = jnp.tri(global_positions.shape[1], k=-1, dtype=bool)[None]
    return jnp.where((same & before).any(-1), -1, global_positions)


def is_global_token(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, T] booleans
    """Return which tokens are global. Padding is not."""
    positions: Any = mask.positions
    is_global = (positions[:, :, None] == global_positions[:, None, :]).any(-1)
    return is_global & (mask.key_segments != 0)


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
    # The gathered global keys get segment 1 where they exist, and queries see only their own.
    is_token = (segments != 0).astype(jnp.int32)
    return mask.replace(segments=is_token, key_segments=is_token)


def find_global_tokens(
    mask: Mask,  # with positions and key_segments [B or 1, T], of one document
    global_positions: jax.Array,  # [B or 1, n]
) -> jax.Array:  # [B or 1, n]
    """Return the row index of the token at each listed position; T if there is none."""
    positions: Any = mask.positions
    # Padding may have position 0 too; -1 equals no listed position.
    token_positions = jnp.where(mask.key_segments != 0, positions, -1)
    # [B, n, T] booleans: small beside the scores of n global tokens with all T.
    matches = (token_positions[:, None, :] == global_positions[:, :, None]) & (
        global_positions >= 0
    )[:, :, None]
    # `argmax` of booleans is the first match. Positions of one document are distinct.
    return jnp.where(matches.any(-1), matches.argmax(-1), positions.shape[1])


def attend_to_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # with positions and segments [B or 1, T]
    score_spec: ScoreSpec,
    index: jax.Array,  # [B or 1, n]; T: none
) -> PartialAttention:
    """Attend from all queries to the global keys only. Cost O(n T)."""
    exists = (index < q.shape[1]).astype(jnp.int32)
    positions: Any = mask.positions
    key_mask = mask.with_keys(gather_tokens(positions, index), exists)
    return attend_blockwise(
        q, gather_tokens(k, index), gather_tokens(v, index), key_mask, score_spec
    )


class _GlobalToken(NamedTuple):
    """Global token at one position of each token's document."""

    row_index: jax.Array  # [B or 1, T]
    exists: jax.Array  # [B or 1, T] booleans
    offset: jax.Array  # [B or 1, T] its position minus that of the token


def _find_global_token(
    mask: Mask,  # with positions and key_segments [B or 1, T]
    position: jax.Array,  # [B or 1]
) -> _GlobalToken:
    positions: Any = mask.positions
    segments: Any = mask.key_segments
    length = positions.shape[1]
    offset = position[:, None] - positions
    # Positions count up by one within a document, so the offset in positions is also the offset
    # in the row. The checks below reject indices that land in another document.
    index = jnp.arange(length)[None, :] + offset
    exists = (index >= 0) & (index < length) & (position >= 0)[:, None] & (segments != 0)
    index = jnp.clip(index, 0, length - 1)
    exists &= gather_tokens(segments, index) == segments
    exists &= gather_tokens(positions, index) == position[:, None]
    return _GlobalToken(index, exists, offset)


def attend_to_packed_globals(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal or not; with positions and key_segments [B or 1, T]
    score_spec: ScoreSpec,
    global_positions: jax.Array,  # [B or 1, n] distinct positions; -1: none
) -> PartialAttention:
    """Attend from all queries to the global keys of their own document."""
    dtype, operand_dtype = v.dtype, score_spec.operand_dtype_of(q)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    # Widened: a global key gets a term of its gradient from every token of its document.
    grouped_q = _grouped(q, k).astype(sum_dtype)
    keys, values = (each.astype(sum_dtype) for each in (k, v))

    # `checkpoint` keeps the gathered keys and values [B, T, K, H] of each position out of the
    # residuals of the loop over positions.
    @jax.checkpoint
    def score(position: jax.Array) -> jax.Array:  # [B, T, K, G]
        global_token = _find_global_token(mask, position)
        visible = (
            # Causal: at the token's own position or before it.
            global_token.exists & (global_token.offset <= 0)
            if mask.pattern.causal
            else global_token.exists
        )
        global_keys = gather_tokens(keys, global_token.row_index)
        scores = precise_einsum(
            "BTKGH,BTKH->BTKG", grouped_q, global_keys, operand_dtype, sum_dtype
        )
        scores = scores.astype(score_spec.softmax_dtype) * score_spec.scale
        return jnp.where(visible[..., None, None], scores, -jnp.inf)

    @jax.checkpoint
    def weighted_value(
        position: jax.Array, weights: jax.Array
    ) -> jax.Array:  # [B, T, K, G, H of values]
        global_values = gather_tokens(values, _find_global_token(mask, position).row_index)
        return weights[..., None] * global_values[:, :, :, None]

    positions = global_positions.T
    # Scores of all n positions fit in memory, as they have no axis H: one softmax, in one piece.
    scores = jax.lax.map(score, positions)  # [n, B, T, K, G]
    # Queries without a visible global key have max_score -inf; use 0 to avoid inf - inf.
    max_score = _finite(jax.lax.stop_gradient(scores.max(0)))
    exp_scores = jnp.exp(scores - max_score[None])
    total = exp_scores.sum(0)
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1)
    # Dropout keys are per example, so the batch axis goes first.
    weights = jnp.moveaxis(exp_scores / total[None], 0, 1)
    weights = jnp.moveaxis(dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs), 1, 0)

    def add(y: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        # Added up position by position: all at once would take n times the memory of the result.
        return y + weighted_value(*inputs), None

    zeros = jnp.zeros((*grouped_q.shape[:-1], v.shape[-1]), values.dtype)
    y, _ = jax.lax.scan(add, zeros, (positions, weights))
    # With the lse, the caller merges this with the attention inside the window.
    lse = jnp.where(has_keys, max_score + jnp.log(total), -jnp.inf)
    shape = (*q.shape[:3], v.shape[-1])
    return PartialAttention(y.reshape(shape).astype(dtype), lse.reshape(shape[:3]).swapaxes(1, 2))


def attend_from_packed_globals(
    y: jax.Array,  # [B, T, N, H of values] of all queries
    q: jax.Array,  # [B, T, N, H]; those of global tokens are looked at
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal or not; with positions and key_segments [B or 1, T]
    score_spec: ScoreSpec,
    global_positions: jax.Array,  # [B or 1, n] distinct positions; -1: none
) -> jax.Array:  # [B, T, N, H of values]
    """Return `y` with the rows of global tokens replaced by attention over their whole document."""
    batch, length = q.shape[:2]
    example = jnp.arange(batch)[:, None]
    operand_dtype = score_spec.operand_dtype_of(q)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    queries, keys, values = (each.astype(sum_dtype) for each in (q, k, v))

    @jax.checkpoint
    def attend_from_position(
        position: jax.Array, step: jax.Array
    ) -> jax.Array:  # [B, T, N, H of values]
        """Return the attention of each document's global token at `position`, in its own row."""
        global_token = _find_global_token(mask, position)
        visible = (
            # Causal: the global query sees the tokens up to itself.
            global_token.exists & (global_token.offset >= 0)
            if mask.pattern.causal
            else global_token.exists
        )
        # Where the token's own global token is; T, which scatters drop, if it does not see the
        # token.
        index = jnp.broadcast_to(
            jnp.where(visible, global_token.row_index, length), (batch, length)
        )

        def sum_per_global(x: jax.Array) -> jax.Array:  # -> sums, at the index of each global token
            return jnp.zeros_like(x).at[example, index].add(x, mode="drop")

        # Each token scores itself as a key of its document's global query, found by offset. The
        # softmax is then a segment sum, scattered to the row of the global token.
        global_q = _grouped(gather_tokens(queries, global_token.row_index), k)
        scores = precise_einsum("BTKGH,BTKH->BTKG", global_q, keys, operand_dtype, sum_dtype)
        scores = scores.astype(score_spec.softmax_dtype) * score_spec.scale
        scores = jnp.where(visible[..., None, None], scores, -jnp.inf)
        # Segment maximum, for numerical stability only: the result does not depend on it.
        scores_without_gradient = jax.lax.stop_gradient(scores)
        max_score = (
            jnp.full_like(scores_without_gradient, -jnp.inf)
            .at[example, index]
            .max(scores_without_gradient, mode="drop")
        )
        # In documents without this global token the maximum stays -inf, and -inf - -inf is NaN.
        exp_scores = jnp.exp(scores - _finite(gather_tokens(max_score, global_token.row_index)))
        dropped = dropout(
            exp_scores, score_spec.dropout_rate, fold_in(score_spec.dropout_rngs, step)
        )
        # Dropout acts on the numerator; the sum is over all weights.
        normalizers = sum_per_global(exp_scores)
        # Weights are divided after this sum: those of one softmax lie in different rows until then.
        rows = sum_per_global(dropped[..., None] * values[:, :, :, None])
        rows = rows / jnp.where(normalizers > 0, normalizers, 1)[..., None]
        return rows.reshape(y.shape).astype(y.dtype)

    # One position at a time: n passes over the tokens instead of an array n times their size.
    def put_rows(y: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        position, step = inputs
        is_global = (mask.positions == position[:, None]) & (mask.key_segments != 0)
        return jnp.where(is_global[..., None, None], attend_from_position(position, step), y), None

    return jax.lax.scan(put_rows, y, (global_positions.T, jnp.arange(global_positions.shape[1])))[0]


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, T, K, G, H]
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def attend_with_absorbed_projections(
    module: nn.Module,
    q: jax.Array,  # [B, n, N, H] of a few queries
    x: jax.Array,  # [B, S, D]
    attend_fn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],  # attention of q, k and v
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, n, N, H]
    """Return `attend_fn` of q and the keys and values of x, without projecting x.

    q . (W x) = (q W) . x, and a mean of W x is W times the mean of x. For a few queries that costs
    less than projecting all of x, with the same weights. The key bias adds a constant to all scores
    of a query, which the softmax ignores. Keys must have neither a norm nor RoPE.
    """
    _, axes = head_axes(config, context.d_model)
    embed, group_size = {"embed": context.d_model}, config.num_heads // axes["kv_heads"]
    # The key bias is declared although nothing reads it: so these weights have the names and shapes
    # of an ordinary projection, and can be exchanged with one.
    (key, _), (value, bias) = (
        declare_linear(module, f"{name}{suffix}", embed, axes, context, bias=config.bias)
        for name in ("key", "value")
    )
    # Matrices with a low-rank update are merged: a query would have to go through both factors.
    key, value = (jnp.repeat(merge_weight(each), group_size, axis=1) for each in (key, value))
    # A value entry of 1 returns the sum of the weights, the factor of the value bias: dropout
    # leaves it different from 1.
    ones = jnp.ones((*x.shape[:2], 1), x.dtype)
    mean = attend_fn(
        # (q W) . x: the tokens themselves are the keys, of one head of width D.
        jnp.einsum("BTNH,DNH->BTND", q, key),
        x[:, :, None],
        jnp.concatenate([x, ones], axis=-1)[:, :, None],
    )
    y = jnp.einsum("BTND,DNH->BTNH", mean[..., :-1], value)
    if bias is not None:
        y = y + mean[..., -1:] * jnp.repeat(bias, group_size, axis=0)[None, None]
    return y

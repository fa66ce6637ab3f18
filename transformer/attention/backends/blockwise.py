"""One tile of attention: a block of queries and one of keys.

Attention tile by tile with a running softmax: memory O(T), forward and backward.

Blocks of queries meet blocks of keys one after the other (Rabe and Staats 2021); the backward pass
computes the scores of each tile again from the logarithms of the softmax's sums (Dao et al. 2022,
algorithms 1 and 4). Tiles that a causal mask or a window hides whole are never visited.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention.backends.tiling import (
    Tiling,
    join_blocks,
    make_tiling,
    pad_mask,
    pad_to_tiles,
    split_blocks,
    tile_mask,
)
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.score_spec import ScoreSpec, weighted_values
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype, round_to_dtype, split_high_low


class TilePass(NamedTuple):
    """What a pass does; hashable."""

    score_fn: Callable[..., jax.Array]
    tiling: Tiling
    dropout_rate: float
    softmax_dtype: str
    operand_dtype: str
    """Dtype of the operands of products. Their results, and the gradients of both, are in `sums`:
    rounded for each tile, the digits in which tiles cancel each other would be lost."""
    skip_masked_tiles: bool
    """Whether a tile is left out if its mask hides all of it: worth asking where nothing else tells
    which tiles are hidden."""

    @property
    def sum_dtype(self) -> Any:
        """Dtype of sums of products."""
        return accumulation_dtype(self.operand_dtype, self.softmax_dtype)


class Tile(NamedTuple):
    """What a pass needs of a block of queries and one of keys."""

    scores: jax.Array  # [B, N, rows, columns]
    visible: jax.Array  # [B or 1, 1, rows, columns]
    dropout_rngs: jax.Array | None  # [B] random keys
    scores_vjp: (
        Any  # cotangent of scores -> those of q, k (not rounded) and what scores have captured
    )


def compute_tile(
    tile_pass: TilePass,
    q: jax.Array,  # [B, N, rows, H]
    k: jax.Array,  # [B, K, columns, H]
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
    query_block: Any,
    key_block: Any,
    *,
    backward: bool = False,
) -> Tile:
    """The tile at a block of queries and one of keys."""
    tiling = tile_pass.tiling
    here = tile_mask(mask, tiling, query_block, key_block)
    rows, columns = here.resolved_positions(tiling.queries_per_tile, tiling.keys_per_tile)

    def scores(q: jax.Array, k: jax.Array, captured: Any) -> jax.Array:
        return tile_pass.score_fn(q.swapaxes(1, 2), k.swapaxes(1, 2), rows, columns, *captured)

    q, k = (
        q.astype(tile_pass.sum_dtype),
        k.astype(tile_pass.sum_dtype),
    )  # for gradients that are wide
    pull = None
    if backward:
        made, pull = jax.vjp(scores, q, k, captured)
    else:
        made = scores(q, k, captured)
    seen = dense_mask(here, tiling.queries_per_tile, tiling.keys_per_tile)[:, None]
    return Tile(made, seen, fold_in(fold_in(dropout_rngs, query_block), key_block), pull)


def visit_unless_masked(
    tile_pass: TilePass,
    mask: Mask,
    query_block: Any,
    key_block: Any,
    visit: Callable[[Any], Any],
    state: Any,
) -> Any:
    """`look(state)`, or `state` if the mask hides the whole tile and that is asked first."""
    if not tile_pass.skip_masked_tiles:
        return visit(state)
    here = tile_mask(mask, tile_pass.tiling, query_block, key_block)
    some = dense_mask(here, tile_pass.tiling.queries_per_tile, tile_pass.tiling.keys_per_tile).any()
    return jax.lax.cond(some, visit, lambda state: state, state)


def dropped_weighted_values(
    tile_pass: TilePass,
    weights: jax.Array,  # [B, N, rows, columns]
    v: jax.Array,  # [B, K, columns, H]
    dropout_rngs: jax.Array | None,  # [B]
) -> jax.Array:  # [B, N, rows, H] not rounded
    """Sums of values under weights, some of which are dropped."""
    dropped = dropout(weights, tile_pass.dropout_rate, dropout_rngs).astype(tile_pass.sum_dtype)
    return weighted_values(
        dropped, v.swapaxes(1, 2), tile_pass.operand_dtype, tile_pass.sum_dtype
    ).swapaxes(1, 2)


DEFAULT_BLOCK_SIZE = 128
"""Queries, and keys, of a tile: small enough for the scores of one to stay in a CPU's cache."""


class PartialAttention(NamedTuple):
    """What attention over some keys has found: enough to merge it with others."""

    y: jax.Array  # [B, T, N, H of values]
    lse: jax.Array  # [B, N, T] logarithm of the sum of exponents of scores; -inf: nothing seen


def attend_blockwise(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    skip_masked_tiles: bool = False,
) -> PartialAttention:
    """The same numbers as `attend_reference`, without the scores [T, S] ever existing.

    Not with relative tables (Shaw's), which act on values too. With `skip_masked_tiles`, a tile
    that the mask hides is left out whatever the order of the tokens. To merge what is found with
    more, give `ScoreSpec.widen` arrays: then `y` is not rounded yet.
    """
    how, *given = _given(q, k, v, mask, score_spec, block_size, skip_masked_tiles)
    y, lse = _blockwise(how, *given)
    return PartialAttention(y[:, : q.shape[1]], lse[:, :, : q.shape[1]])


def blockwise_gradients(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,  # without weights of its own
    lse: jax.Array,  # [B, N, T] of all keys
    dy: jax.Array,  # [B, T, N, H of values]
    delta: jax.Array,  # [B, N, T] of all keys
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    skip_masked_tiles: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # like q, k, v, not rounded
    """What these keys and values have to do with the gradients of attention over more of them.

    `lse` is what attention over all keys has found, `dy` the gradient of the loss in what it
    returned, and `delta` that of `softmax_shift`. Sums over sets of keys are the gradients over
    their union.
    """
    how, *given = _given(q, k, v, mask, score_spec, block_size, skip_masked_tiles)
    missing = given[0].shape[1] - q.shape[1]
    dy = jnp.pad(dy, ((0, 0), (0, missing), (0, 0), (0, 0)))
    lse, delta = (jnp.pad(each, ((0, 0), (0, 0), (0, missing))) for each in (lse, delta))
    dq, dk, dv, _ = _gradients(how, *given, lse=lse, dy=dy, shift=delta)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def softmax_grad_delta(
    out: PartialAttention,
    rounding_error: jax.Array | None,  # what y has lost by rounding
    cotangent: PartialAttention,
    operand_dtype: str,
) -> jax.Array:  # [B, N, T]
    """Return what the gradient of every weight of a row loses, for the gradient of its score.

    That is the sum over keys of P dP = y . dy, of the softmax, less the gradient of the logarithm
    of its sum. The sum is to cancel what the dP = dy v^T of a row have in common. So it is of the
    digits of dy that dP is made of, and of all digits of y: what y lost by rounding would be added
    to all keys alike, and in dq to whatever the keys have in common.
    """
    dtype = out.lse.dtype
    y, dy = out.y.astype(dtype), round_to_dtype(cotangent.y.astype(dtype), operand_dtype)
    if rounding_error is not None:
        y = y + rounding_error.astype(dtype)
    product = jnp.einsum("BTNH,BTNH->BNT", dy, y)
    return product - jnp.where(jnp.isfinite(out.lse), cotangent.lse, 0)


def _given(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    scoring: ScoreSpec,
    block: int,
    looks_first: bool,
) -> tuple[Any, ...]:
    """What `_blockwise` takes: all of it padded to whole tiles."""
    operands = scoring.operand_dtype_of(q)
    scoring = scoring._replace(operand_dtype=operands)  # as the scores of a tile are of wide arrays
    tiling = make_tiling(mask, q.shape[1], k.shape[1], block)
    pad = functools.partial(pad_to_tiles, tiling=tiling)
    q, k, v = pad(q, is_queries=True), pad(k, is_queries=False), pad(v, is_queries=False)

    def scores(q: jax.Array, k: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return scoring.compute_scores(q, k, rows, columns)

    mask = pad_mask(mask, tiling)
    example = tile_mask(mask, tiling, 0, 0).resolved_positions(
        tiling.queries_per_tile, tiling.keys_per_tile
    )
    dtype = accumulation_dtype(operands, scoring.softmax_dtype)
    tile = (
        q[:, : tiling.queries_per_tile].astype(dtype),
        k[:, : tiling.keys_per_tile].astype(dtype),
        *example,
    )
    pure, captured = jax.closure_convert(scores, *tile)
    how = TilePass(pure, tiling, scoring.dropout_rate, scoring.softmax_dtype, operands, looks_first)
    return how, q, k, v, mask, scoring.dropout_rngs, tuple(captured)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    how: TilePass,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
) -> PartialAttention:
    y, lse = _found(how, q, k, v, mask, dropout_rngs, captured)
    return PartialAttention(y.astype(v.dtype), lse)


def _found(
    how: TilePass,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
) -> PartialAttention:  # y not rounded
    tiling = how.tiling
    q, k, v = (each.astype(how.operand_dtype) for each in (q, k, v))
    k_blocks, v_blocks = (
        split_blocks(k, tiling.keys_per_tile),
        split_blocks(v, tiling.keys_per_tile),
    )
    dtype = how.softmax_dtype

    def one_row(inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, q_block = inputs
        b, n, size, _ = q_block.shape

        def look(column: Any, state: Any) -> Any:
            total, largest, y = state
            tile = compute_tile(
                how, q_block, k_blocks[column], mask, dropout_rngs, captured, row, column
            )
            scores = jnp.where(tile.visible, tile.scores, -jnp.inf)
            larger = jnp.maximum(largest, scores.max(-1))
            finite = jnp.where(jnp.isfinite(larger), larger, 0)
            # Rounded as they meet the values, or values would be divided by another sum than that
            # of their weights.
            raised = round_to_dtype(jnp.exp(scores - finite[..., None]), how.operand_dtype)
            shrink = jnp.exp(largest - finite)
            found = dropped_weighted_values(how, raised, v_blocks[column], tile.dropout_rngs)
            total = total * shrink + raised.sum(-1)
            return total, larger, y * shrink[..., None].astype(y.dtype) + found.astype(y.dtype)

        def body(column: Any, state: Any) -> Any:
            return visit_unless_masked(
                how, mask, row, column, functools.partial(look, column), state
            )

        start = (
            jnp.zeros((b, n, size), dtype),
            jnp.full((b, n, size), -jnp.inf, dtype),
            jnp.zeros((b, n, size, v.shape[-1]), dtype),
        )
        total, largest, y = jax.lax.fori_loop(*tiling.key_block_range(row), body, start)
        some = total > 0
        y = jnp.where(some[..., None], y / jnp.where(some, total, 1)[..., None], 0)
        lse = jnp.where(some, largest + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
        return y, lse

    rows = jnp.arange(tiling.num_query_blocks)
    y, lse = jax.lax.map(one_row, (rows, split_blocks(q, tiling.queries_per_tile)))
    return PartialAttention(join_blocks(y), jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1))


def _forward(
    how: TilePass, q: Any, k: Any, v: Any, mask: Any, dropout_rngs: Any, captured: Any
) -> Any:
    y, lse = _found(how, q, k, v, mask, dropout_rngs, captured)
    y, rest = split_high_low(y, v.dtype)
    out = PartialAttention(y, lse)
    # Kept narrow, whatever they were given as: empty arrays remember that.
    like = tuple(jnp.zeros((0,), each.dtype) for each in (q, k, v))
    narrow = tuple(each.astype(how.operand_dtype) for each in (q, k, v))
    return out, (*narrow, mask, dropout_rngs, captured, out, rest, like)


def _backward(how: TilePass, kept: Any, cotangent: PartialAttention) -> Any:
    q, k, v, mask, dropout_rngs, captured, out, rest, like = kept
    shift = softmax_grad_delta(out, rest, cotangent, how.operand_dtype)
    given = q, k, v, mask, dropout_rngs, captured
    found = _gradients(how, *given, lse=out.lse, dy=cotangent.y, shift=shift)
    dq, dk, dv = (each.astype(one.dtype) for each, one in zip(found[:3], like, strict=True))
    return dq, dk, dv, None, None, found[3]


def _gradients(
    how: TilePass,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
    *,
    lse: jax.Array,
    dy: jax.Array,
    shift: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:  # of q, k, v, not rounded, and of `captured`
    """Column of tiles by column (Dao et al. 2022, algorithm 4)."""
    tiling, dtype = how.tiling, how.sum_dtype
    q, k, v, dy = (each.astype(how.operand_dtype) for each in (q, k, v, dy))
    by_row = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], -1, tiling.queries_per_tile), 2, 0)  # noqa: E731
    shift, lse = by_row(shift), by_row(jnp.where(jnp.isfinite(lse), lse, 0))
    q_blocks, dy_blocks = (
        split_blocks(q, tiling.queries_per_tile),
        split_blocks(dy, tiling.queries_per_tile),
    )
    add = lambda old, new: old + new.astype(old.dtype)  # noqa: E731

    def one_column(carry: Any, inputs: Any) -> Any:
        column, k_block, v_block = inputs

        def look(row: Any, state: Any) -> Any:
            dq, d_captured, dk, dv = state
            tile = compute_tile(
                how,
                q_blocks[row],
                k_block,
                mask,
                dropout_rngs,
                captured,
                row,
                column,
                backward=True,
            )
            raised = jnp.exp(tile.scores - lse[row][..., None])
            weights = jnp.where(tile.visible, raised, 0)
            given = weights, v_block.astype(dtype)
            _, pull = jax.vjp(
                lambda w, x: dropped_weighted_values(how, w, x, tile.dropout_rngs), *given
            )
            d_weights, dv_here = pull(dy_blocks[row].astype(dtype))
            d_scores = weights * (d_weights - shift[row][..., None])
            dq_here, dk_here, d_here = tile.scores_vjp(d_scores)
            dq = dq.at[row].add(dq_here)
            return dq, jax.tree.map(add, d_captured, d_here), add(dk, dk_here), add(dv, dv_here)

        def body(row: Any, state: Any) -> Any:
            return visit_unless_masked(how, mask, row, column, functools.partial(look, row), state)

        start = (*carry, zeros(k_block), zeros(v_block))
        dq, d_captured, dk, dv = jax.lax.fori_loop(*tiling.query_block_range(column), body, start)
        return (dq, d_captured), (dk, dv)

    zeros = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, dtype))  # noqa: E731
    start = zeros(q_blocks), jax.tree.map(zeros, captured)
    columns = jnp.arange(tiling.num_key_blocks)
    cut = columns, split_blocks(k, tiling.keys_per_tile), split_blocks(v, tiling.keys_per_tile)
    (dq, d_captured), (dk, dv) = jax.lax.scan(one_column, start, cut)
    d_captured = jax.tree.map(lambda x, like: x.astype(like.dtype), d_captured, captured)
    return join_blocks(dq), join_blocks(dk), join_blocks(dv), d_captured


_blockwise.defvjp(_forward, _backward)

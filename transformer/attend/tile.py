"""One tile of attention: a block of queries and one of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from transformer.attend.scoring import weighted_values
from transformer.attend.tiles import Tiling, tile_mask
from transformer.contract import accumulation_dtype
from transformer.dropout import dropout, fold_in
from transformer.masks import Mask, dense_mask


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

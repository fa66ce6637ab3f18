"""One tile of attention: a block of queries and one of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from transformer.attend.scoring import averages
from transformer.attend.tiles import Tiling, tile_mask
from transformer.contract import wide
from transformer.dropout import dropout, fold
from transformer.masks import Mask, dense


class How(NamedTuple):
    """What a pass does; hashable."""

    scores: Callable[..., jax.Array]
    tiling: Tiling
    rate: float
    softmax_dtype: str
    operands: str
    """Dtype of the operands of products. Their results, and the gradients of both, are in `sums`:
    rounded for each tile, the digits in which tiles cancel each other would be lost."""
    looks_first: bool
    """Whether a tile is left out if its mask hides all of it: worth asking where nothing else tells
    which tiles are hidden."""

    @property
    def sums(self) -> Any:
        """Dtype of sums of products."""
        return wide(self.operands, self.softmax_dtype)


class Tile(NamedTuple):
    """What a pass needs of a block of queries and one of keys."""

    scores: jax.Array  # [B, N, rows, columns]
    seen: jax.Array  # [B or 1, 1, rows, columns]
    dropout_rngs: jax.Array | None  # [B] random keys
    pull: Any  # cotangent of scores -> those of q, k (not rounded) and what scores have captured


def tile_of(
    how: How,
    q: jax.Array,  # [B, N, rows, H]
    k: jax.Array,  # [B, K, columns, H]
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
    row: Any,
    column: Any,
    *,
    backward: bool = False,
) -> Tile:
    """The tile at a block of queries and one of keys."""
    tiling = how.tiling
    here = tile_mask(mask, tiling, row, column)
    rows, columns = here.places(tiling.rows, tiling.columns)

    def scores(q: jax.Array, k: jax.Array, captured: Any) -> jax.Array:
        return how.scores(q.swapaxes(1, 2), k.swapaxes(1, 2), rows, columns, *captured)

    q, k = q.astype(how.sums), k.astype(how.sums)  # for gradients that are wide
    pull = None
    if backward:
        made, pull = jax.vjp(scores, q, k, captured)
    else:
        made = scores(q, k, captured)
    seen = dense(here, tiling.rows, tiling.columns)[:, None]
    return Tile(made, seen, fold(fold(dropout_rngs, row), column), pull)


def where_seen(
    how: How, mask: Mask, row: Any, column: Any, look: Callable[[Any], Any], state: Any
) -> Any:
    """`look(state)`, or `state` if the mask hides the whole tile and that is asked first."""
    if not how.looks_first:
        return look(state)
    here = tile_mask(mask, how.tiling, row, column)
    some = dense(here, how.tiling.rows, how.tiling.columns).any()
    return jax.lax.cond(some, look, lambda state: state, state)


def weighed(
    how: How,
    weights: jax.Array,  # [B, N, rows, columns]
    v: jax.Array,  # [B, K, columns, H]
    dropout_rngs: jax.Array | None,  # [B]
) -> jax.Array:  # [B, N, rows, H] not rounded
    """Sums of values under weights, some of which are dropped."""
    dropped = dropout(weights, how.rate, dropout_rngs).astype(how.sums)
    return averages(dropped, v.swapaxes(1, 2), how.operands, how.sums).swapaxes(1, 2)

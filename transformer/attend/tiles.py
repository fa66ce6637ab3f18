"""How attention is cut into tiles: blocks of queries by blocks of keys, and which of them meet."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.masks import Mask


class Tiling(NamedTuple):
    """How queries and keys are cut; static."""

    queries: int  # T
    keys: int  # S
    rows: int  # queries of a tile
    columns: int  # keys of a tile
    behind: int | None  # index i sees no key before i - behind; None: there is no such bound
    ahead: int | None  # nor after i + ahead

    @property
    def row_blocks(self) -> int:
        return -(-self.queries // self.rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.keys // self.columns)

    def columns_of(self, row: Any) -> tuple[Any, Any]:
        """The first and the end of the blocks of keys that a block of queries meets."""
        first: Any = 0
        end: Any = self.column_blocks
        if self.behind is not None:
            first = jnp.maximum(0, (row * self.rows - self.behind) // self.columns)
        if self.ahead is not None:
            last = (row * self.rows + self.rows - 1 + self.ahead) // self.columns
            end = jnp.minimum(end, last + 1)
        return first, end

    def rows_of(self, column: Any) -> tuple[Any, Any]:
        """The first and the end of the blocks of queries that a block of keys meets."""
        first: Any = 0
        end: Any = self.row_blocks
        if self.ahead is not None:
            first = jnp.maximum(0, (column * self.columns - self.ahead) // self.rows)
        if self.behind is not None:
            last = (column * self.columns + self.columns - 1 + self.behind) // self.rows
            end = jnp.minimum(end, last + 1)
        return first, end


def own_keys(mask: Mask, queries: int, keys: int) -> bool:
    """Whether the keys are the queries' own."""
    return mask.key_positions is None and queries == keys


def tiling_of(mask: Mask, queries: int, keys: int, block: int) -> Tiling:
    """Bounds hold for keys that are the queries' own, in order: then index tells position."""
    pattern = mask.pattern
    behind = ahead = None
    if own_keys(mask, queries, keys) and pattern.ordered and not pattern.prefix:
        if pattern.window and mask.globals is None:
            behind = ahead = (pattern.window - 1) * pattern.dilation
        if pattern.causal:
            ahead = 0
    return Tiling(queries, keys, min(block, queries), min(block, keys), behind, ahead)


def padded(x: jax.Array, *, tiling: Tiling, queries: bool) -> jax.Array:  # [B, T, ...]
    """With zeros after the last, up to whole blocks."""
    size = tiling.row_blocks * tiling.rows if queries else tiling.column_blocks * tiling.columns
    return _lengthened(x, 1, size)


def _lengthened(x: jax.Array, axis: int, size: int) -> jax.Array:
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width) if size > x.shape[axis] else x


def whole(mask: Mask, tiling: Tiling) -> Mask:
    """The mask with all its arrays given, as long as the tiles are together."""
    rows, columns = tiling.row_blocks * tiling.rows, tiling.column_blocks * tiling.columns
    places = mask.places(tiling.queries, tiling.keys)
    own = mask.segments
    theirs = own if mask.key_segments is None else mask.key_segments
    lengths = mask.lengths
    if lengths is None and columns > tiling.keys:
        lengths = jnp.full((1,), tiling.keys, jnp.int32)
    allowed = mask.allowed
    if allowed is not None:
        allowed = _lengthened(_lengthened(allowed, 1, rows), 2, columns)
    return mask.replace(
        positions=_lengthened(places[0], 1, rows),
        key_positions=_lengthened(places[1], 1, columns),
        segments=None if own is None else _lengthened(own, 1, rows),
        key_segments=None if theirs is None else _lengthened(theirs, 1, columns),
        lengths=lengths,
        allowed=allowed,
    )


def tile_mask(mask: Mask, tiling: Tiling, row: Any, column: Any) -> Mask:
    """The mask of one tile."""

    def cut(x: jax.Array | None, index: Any, size: int, axis: int = 1) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    allowed = cut(mask.allowed, row, tiling.rows)
    return mask.replace(
        positions=cut(mask.positions, row, tiling.rows),
        key_positions=cut(mask.key_positions, column, tiling.columns),
        segments=cut(mask.segments, row, tiling.rows),
        key_segments=cut(mask.key_segments, column, tiling.columns),
        lengths=None if mask.lengths is None else mask.lengths - column * tiling.columns,
        allowed=cut(allowed, column, tiling.columns, 2),
    )


def blocks(x: jax.Array, size: int) -> jax.Array:  # [B, T, N, H] -> [blocks, B, N, size, H]
    """Cut along the length, heads before tokens."""
    b, t, n, h = x.shape
    return jnp.asarray(x).reshape(b, t // size, size, n, h).transpose(1, 0, 3, 2, 4)


def unblocked(x: jax.Array) -> jax.Array:  # [blocks, B, N, size, H] -> [B, T, N, H]
    """What `blocks` has cut, as it was."""
    count, b, n, size, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, count * size, n, h)

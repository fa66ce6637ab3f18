"""How attention is cut into tiles: blocks of queries by blocks of keys, and which of them meet."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attention.masks import Mask


class Tiling(NamedTuple):
    """How queries and keys are cut; static."""

    num_queries: int  # T
    num_keys: int  # S
    queries_per_tile: int  # queries of a tile
    keys_per_tile: int  # keys of a tile
    lookback: int | None  # index i sees no key before i - behind; None: there is no such bound
    lookahead: int | None  # nor after i + ahead

    @property
    def num_query_blocks(self) -> int:
        return -(-self.num_queries // self.queries_per_tile)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.num_keys // self.keys_per_tile)

    def key_block_range(self, query_block: Any) -> tuple[Any, Any]:
        """The first and the end of the blocks of keys that a block of queries meets."""
        first: Any = 0
        end: Any = self.num_key_blocks
        if self.lookback is not None:
            first = jnp.maximum(
                0, (query_block * self.queries_per_tile - self.lookback) // self.keys_per_tile
            )
        if self.lookahead is not None:
            last = (
                query_block * self.queries_per_tile + self.queries_per_tile - 1 + self.lookahead
            ) // self.keys_per_tile
            end = jnp.minimum(end, last + 1)
        return first, end

    def query_block_range(self, key_block: Any) -> tuple[Any, Any]:
        """The first and the end of the blocks of queries that a block of keys meets."""
        first: Any = 0
        end: Any = self.num_query_blocks
        if self.lookahead is not None:
            first = jnp.maximum(
                0, (key_block * self.keys_per_tile - self.lookahead) // self.queries_per_tile
            )
        if self.lookback is not None:
            last = (
                key_block * self.keys_per_tile + self.keys_per_tile - 1 + self.lookback
            ) // self.queries_per_tile
            end = jnp.minimum(end, last + 1)
        return first, end


def keys_match_queries(mask: Mask, num_queries: int, num_keys: int) -> bool:
    """Whether the keys are the queries' own."""
    return mask.key_positions is None and num_queries == num_keys


def make_tiling(mask: Mask, num_queries: int, num_keys: int, block_size: int) -> Tiling:
    """Bounds hold for keys that are the queries' own, in order: then index tells position."""
    pattern = mask.pattern
    behind = ahead = None
    if keys_match_queries(mask, num_queries, num_keys) and pattern.ordered and not pattern.prefix:
        if pattern.window and mask.global_positions is None:
            behind = ahead = (pattern.window - 1) * pattern.dilation
        if pattern.causal:
            ahead = 0
    return Tiling(
        num_queries,
        num_keys,
        min(block_size, num_queries),
        min(block_size, num_keys),
        behind,
        ahead,
    )


def pad_to_tiles(x: jax.Array, *, tiling: Tiling, is_queries: bool) -> jax.Array:  # [B, T, ...]
    """With zeros after the last, up to whole blocks."""
    size = (
        tiling.num_query_blocks * tiling.queries_per_tile
        if is_queries
        else tiling.num_key_blocks * tiling.keys_per_tile
    )
    return _lengthened(x, 1, size)


def _lengthened(x: jax.Array, axis: int, size: int) -> jax.Array:
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width) if size > x.shape[axis] else x


def pad_mask(mask: Mask, tiling: Tiling) -> Mask:
    """The mask with all its arrays given, as long as the tiles are together."""
    rows, columns = (
        tiling.num_query_blocks * tiling.queries_per_tile,
        tiling.num_key_blocks * tiling.keys_per_tile,
    )
    places = mask.resolved_positions(tiling.num_queries, tiling.num_keys)
    own = mask.segments
    theirs = own if mask.key_segments is None else mask.key_segments
    lengths = mask.key_lengths
    if lengths is None and columns > tiling.num_keys:
        lengths = jnp.full((1,), tiling.num_keys, jnp.int32)
    allowed = mask.allowed
    if allowed is not None:
        allowed = _lengthened(_lengthened(allowed, 1, rows), 2, columns)
    return mask.replace(
        positions=_lengthened(places[0], 1, rows),
        key_positions=_lengthened(places[1], 1, columns),
        segments=None if own is None else _lengthened(own, 1, rows),
        key_segments=None if theirs is None else _lengthened(theirs, 1, columns),
        key_lengths=lengths,
        allowed=allowed,
    )


def tile_mask(mask: Mask, tiling: Tiling, query_block: Any, key_block: Any) -> Mask:
    """The mask of one tile."""

    def cut(x: jax.Array | None, index: Any, size: int, axis: int = 1) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    allowed = cut(mask.allowed, query_block, tiling.queries_per_tile)
    return mask.replace(
        positions=cut(mask.positions, query_block, tiling.queries_per_tile),
        key_positions=cut(mask.key_positions, key_block, tiling.keys_per_tile),
        segments=cut(mask.segments, query_block, tiling.queries_per_tile),
        key_segments=cut(mask.key_segments, key_block, tiling.keys_per_tile),
        key_lengths=None
        if mask.key_lengths is None
        else mask.key_lengths - key_block * tiling.keys_per_tile,
        allowed=cut(allowed, key_block, tiling.keys_per_tile, 2),
    )


def split_blocks(
    x: jax.Array, block_size: int
) -> jax.Array:  # [B, T, N, H] -> [blocks, B, N, size, H]
    """Cut along the length, heads before tokens."""
    b, t, n, h = x.shape
    return jnp.asarray(x).reshape(b, t // block_size, block_size, n, h).transpose(1, 0, 3, 2, 4)


def join_blocks(x: jax.Array) -> jax.Array:  # [blocks, B, N, size, H] -> [B, T, N, H]
    """What `blocks` has cut, as it was."""
    count, b, n, size, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, count * size, n, h)

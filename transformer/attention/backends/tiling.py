"""Tiles of attention: a block of queries against a block of keys.

- `Tiling`: block sizes, and which tiles a causal mask or a window can hide. Static.
- `pad_to_tiles`, `pad_mask`, `tile_mask`: inputs padded to whole tiles, and the mask of one tile.
- `TilePass`: static settings of a pass over tiles.
- `Tile`, `compute_tile`: scores and mask of one tile, and the gradient of its scores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Shaped

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.reference import weighted_values
from transformer.layers.basic import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype

Index = int | jax.Array
"""Number of a block."""


class Tiling(NamedTuple):
    """Partition of queries and keys into blocks. Static and hashable."""

    num_queries: int  # T
    num_keys: int  # S
    queries_per_tile: int
    keys_per_tile: int
    lookback: int | None  # index i sees no key before i - lookback; None: no bound
    lookahead: int | None  # index i sees no key after i + lookahead; None: no bound

    @property
    def num_query_blocks(self) -> int:
        return -(-self.num_queries // self.queries_per_tile)

    @property
    def num_key_blocks(self) -> int:
        return -(-self.num_keys // self.keys_per_tile)

    def key_block_range(self, query_block: Index) -> tuple[Index, Index]:
        """Return the first key block that a query block can see, and the end of the range."""
        first: Index = 0
        end: Index = self.num_key_blocks
        # A range for the whole block: its first query looks back furthest, its last query looks
        # ahead furthest. The mask decides the rest within a tile.
        first_query = query_block * self.queries_per_tile
        if self.lookback is not None:
            # `//` rounds towards -inf: an index before the first key becomes block -1 or less, and
            # then 0.
            first = jnp.maximum(0, (first_query - self.lookback) // self.keys_per_tile)
        if self.lookahead is not None:
            last_query = first_query + self.queries_per_tile - 1
            last_key_block = (last_query + self.lookahead) // self.keys_per_tile
            end = jnp.minimum(end, last_key_block + 1)
        return first, end

    def query_block_range(self, key_block: Index) -> tuple[Index, Index]:
        """Return the first query block that can see a key block, and the end of the range."""
        first: Index = 0
        end: Index = self.num_query_blocks
        # The inverse of `key_block_range`, for the backward pass: both visit the same tiles.
        first_key = key_block * self.keys_per_tile
        if self.lookahead is not None:
            # Solved for the query: i sees key j if j <= i + lookahead, so j is seen from j -
            # lookahead.
            first = jnp.maximum(0, (first_key - self.lookahead) // self.queries_per_tile)
        if self.lookback is not None:
            last_key = first_key + self.keys_per_tile - 1
            last_query_block = (last_key + self.lookback) // self.queries_per_tile
            end = jnp.minimum(end, last_query_block + 1)
        return first, end


def make_tiling(mask: Mask, num_queries: int, num_keys: int, block_size: int) -> Tiling:
    """Return tiles of `block_size` queries and keys, or fewer where there are fewer."""
    pattern = mask.pattern
    lookback = lookahead = None
    # Only in self-attention over ordered tokens does the distance of two indices bound that of
    # their positions.
    matched = mask.keys_match_queries(num_queries, num_keys)
    # A prefix is visible to every token, however far away.
    if matched and pattern.ordered and not pattern.prefix:
        # Global tokens see, and are seen, beyond the window, but not into the future.
        if pattern.window and mask.global_positions is None:
            lookback = lookahead = (pattern.window - 1) * pattern.dilation
        if pattern.causal:
            lookahead = 0
    return Tiling(
        num_queries=num_queries,
        num_keys=num_keys,
        # A decoding step has one query: a tile of 128 would compute 127 rows of padding.
        queries_per_tile=min(block_size, num_queries),
        keys_per_tile=min(block_size, num_keys),
        lookback=lookback,
        lookahead=lookahead,
    )


def pad_to_tiles(x: jax.Array, *, tiling: Tiling, is_queries: bool) -> Shaped[Array, "B T ..."]:
    """Pad queries or keys with zeros to whole blocks."""
    if is_queries:
        return _pad(x, 1, tiling.num_query_blocks * tiling.queries_per_tile)
    return _pad(x, 1, tiling.num_key_blocks * tiling.keys_per_tile)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, width) if size > x.shape[axis] else x


def pad_mask(mask: Mask, tiling: Tiling) -> Mask:
    """Return the mask with explicit positions, and all arrays padded to whole tiles.

    Padding queries may see anything: their results are cut off. Padding keys are hidden by
    `key_lengths`.
    """
    query_size = tiling.num_query_blocks * tiling.queries_per_tile
    key_size = tiling.num_key_blocks * tiling.keys_per_tile
    positions, key_positions = mask.resolved_positions(tiling.num_queries, tiling.num_keys)
    segments = mask.segments
    key_segments = mask.resolved_key_segments
    key_lengths = mask.key_lengths
    # Padding has position 0, like the first token, so a length has to hide it.
    if key_lengths is None and key_size > tiling.num_keys:
        key_lengths = jnp.full((1,), tiling.num_keys, jnp.int32)
    # Filled with False, which hides; segments below with 0, which is padding already.
    allowed = mask.allowed
    if allowed is not None:
        allowed = _pad(_pad(allowed, 1, query_size), 2, key_size)
    return mask.replace(
        positions=_pad(positions, 1, query_size),
        key_positions=_pad(key_positions, 1, key_size),
        segments=None if segments is None else _pad(segments, 1, query_size),
        key_segments=None if key_segments is None else _pad(key_segments, 1, key_size),
        key_lengths=key_lengths,
        allowed=allowed,
    )


def tile_mask(mask: Mask, tiling: Tiling, query_block: Index, key_block: Index) -> Mask:
    """Return the part of a padded mask that belongs to one tile."""
    num_queries, num_keys = tiling.queries_per_tile, tiling.keys_per_tile

    def cut(x: jax.Array | None, block: Index, size: int, axis: int = 1) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)

    # Block numbers are traced in the loops over tiles: the start is dynamic, the size static.
    # Lengths count from the first key of a tile, so they shift with it; they may be negative.
    key_lengths = mask.key_lengths
    if key_lengths is not None:
        key_lengths = key_lengths - key_block * num_keys
    allowed_rows = cut(mask.allowed, query_block, num_queries)
    return mask.replace(
        positions=cut(mask.positions, query_block, num_queries),
        key_positions=cut(mask.key_positions, key_block, num_keys),
        segments=cut(mask.segments, query_block, num_queries),
        key_segments=cut(mask.key_segments, key_block, num_keys),
        key_lengths=key_lengths,
        allowed=cut(allowed_rows, key_block, num_keys, axis=2),
    )


def split_blocks(
    x: Float[Array, "B T N H"],
    block_size: int,
) -> Float[Array, "blocks B N block_size H"]:
    """Split the length into blocks, and move heads before tokens."""
    # Blocks in front, because loops slice the leading axis; then heads, the batch of the matmuls.
    b, t, n, h = x.shape
    return jnp.asarray(x).reshape(b, t // block_size, block_size, n, h).transpose(1, 0, 3, 2, 4)


def join_blocks(
    x: Float[Array, "blocks B N block_size H"],
) -> Float[Array, "B T N H"]:
    """Invert `split_blocks`."""
    num_blocks, b, n, block_size, h = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, num_blocks * block_size, n, h)


class TilePass(NamedTuple):
    """Static settings of a pass over tiles. Hashable: `custom_vjp` and jit key on it."""

    score_fn: Callable[..., jax.Array]
    """`ScoreSpec.compute_scores` without captured arrays, which are its last arguments."""
    tiling: Tiling
    dropout_rate: float
    softmax_dtype: str
    operand_dtype: str
    """Dtype of the operands of products."""
    skip_masked_tiles: bool
    """Test each tile's mask and skip the tile if it hides everything. Only pays for masks whose
    structure does not already say which tiles are empty (segments, reordered tokens)."""

    @property
    def sum_dtype(self) -> Any:
        """Dtype of products and of their gradients.

        Rounded to `operand_dtype` in each tile, they would lose the digits in which tiles cancel.
        """
        return accumulation_dtype(self.operand_dtype, self.softmax_dtype)


class Tile(NamedTuple):
    """Intermediates of one tile of `rows` queries and `columns` keys."""

    scores: Float[Array, "B N rows columns"]
    visible: Bool[Array, "#B 1 rows columns"]
    dropout_rngs: Key[Array, "B"] | None
    scores_vjp: Any  # gradient of scores -> those of q and k in `sum_dtype`, and of `captured`


def compute_tile(
    tile_pass: TilePass,
    q: Float[Array, "B N rows H"],
    k: Float[Array, "B K columns H"],
    mask: Mask,
    dropout_rngs: jax.Array | None,
    captured: tuple[Any, ...],
    query_block: Index,
    key_block: Index,
    *,
    backward: bool = False,
) -> Tile:
    """Compute the scores and the mask of a tile; for the backward pass also `scores_vjp`."""
    tiling = tile_pass.tiling
    mask_of_tile = tile_mask(mask, tiling, query_block, key_block)
    num_queries, num_keys = tiling.queries_per_tile, tiling.keys_per_tile
    query_positions, key_positions = mask_of_tile.resolved_positions(num_queries, num_keys)

    def compute_scores(q: jax.Array, k: jax.Array, captured: Any) -> jax.Array:
        # Blocks have heads before tokens; score functions take tokens before heads.
        return tile_pass.score_fn(
            q.swapaxes(1, 2), k.swapaxes(1, 2), query_positions, key_positions, *captured
        )

    # A gradient has the dtype of its argument: cast here, dq and dk stay wide until all tiles are
    # summed. `score_fn` rounds the operands of its product back to `operand_dtype`.
    q, k = q.astype(tile_pass.sum_dtype), k.astype(tile_pass.sum_dtype)
    scores_vjp = None
    # The backward pass computes the scores again: for long inputs that is faster than reading [T,
    # S] from memory (Dao et al. 2022, section 3.1).
    if backward:
        scores, scores_vjp = jax.vjp(compute_scores, q, k, captured)
    else:
        scores = compute_scores(q, k, captured)
    # Booleans of this tile alone; the whole mask [T, S] never exists.
    visible = dense_mask(mask_of_tile, num_queries, num_keys)[:, None]
    # The rngs depend on the tile alone, so the backward pass drops the same weights.
    return Tile(scores, visible, fold_in(fold_in(dropout_rngs, query_block), key_block), scores_vjp)


def add_unless_masked(
    tile_pass: TilePass,
    mask: Mask,
    query_block: Index,
    key_block: Index,
    add_tile: Callable[[Any], Any],
    state: Any,
) -> Any:
    """Return `add_tile(state)`, or `state` if the tile's mask is tested and hides everything."""
    # The test costs a few comparisons for each pair of tokens, the tile several products of width
    # H: worth it if some tiles are empty, lost if none is.
    if not tile_pass.skip_masked_tiles:
        return add_tile(state)
    tiling = tile_pass.tiling
    mask_of_tile = tile_mask(mask, tiling, query_block, key_block)
    any_visible = dense_mask(mask_of_tile, tiling.queries_per_tile, tiling.keys_per_tile).any()
    # `cond` runs one of its branches. Not under `vmap`, which turns it into a `where` of both.
    return jax.lax.cond(any_visible, add_tile, lambda state: state, state)


def dropped_weighted_values(
    tile_pass: TilePass,
    weights: Float[Array, "B N rows columns"],
    v: Float[Array, "B K columns H"],
    dropout_rngs: Key[Array, "B"] | None,
) -> Float[Array, "B N rows H"]:  # in `sum_dtype`
    """Apply dropout to the weights and return the weighted sums of the values."""
    # Only the values see what is dropped. The denominator of the softmax has all weights, so a
    # dropped key still counts in it, as in `attend_reference`.
    dropped = dropout(weights, tile_pass.dropout_rate, dropout_rngs).astype(tile_pass.sum_dtype)
    y = weighted_values(dropped, v.swapaxes(1, 2), tile_pass.operand_dtype, tile_pass.sum_dtype)
    return y.swapaxes(1, 2)

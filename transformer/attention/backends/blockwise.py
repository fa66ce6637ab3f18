"""Blockwise attention with a running softmax: memory O(T), forward and backward.

Forward (Rabe and Staats 2021; Dao et al. 2022, algorithm 1), for each block of queries:

    m = running maximum of the scores, l = running sum of exp(score - m), y = running sum of
    exp(score - m) v. A new block of keys rescales l and y by exp(m_old - m_new).
    Result: y / l, and lse = m + log l.

Backward (algorithm 4), for each block of keys, with P = exp(score - lse) recomputed per tile:

    dV = P^T dY        dP = dY V^T        dS = P * (dP - delta)        delta = rowsum(Y * dY)

Tiles that a causal mask or a window hides are never visited.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from transformer.attention.backends.partial import PartialAttention
from transformer.attention.backends.tiling import (
    Index,
    TilePass,
    add_unless_masked,
    compute_tile,
    dropped_weighted_values,
    join_blocks,
    make_tiling,
    pad_mask,
    pad_to_tiles,
    split_blocks,
    tile_mask,
)
from transformer.attention.masks import Mask
from transformer.attention.reference import ScoreSpec
from transformer.layers.precise_einsum import accumulation_dtype, round_to_dtype, split_high_low

DEFAULT_BLOCK_SIZE = 128
"""Queries and keys of a tile; the scores of one tile fit into a CPU's cache."""


class TileInputs(NamedTuple):
    """Arrays of a pass over tiles, padded to whole tiles."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    mask: Mask
    dropout_rngs: Key[Array, "B"] | None
    captured: tuple[Any, ...]  # arrays of the score function, such as the table of a bias


def attend_blockwise(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    skip_masked_tiles: bool = False,
) -> PartialAttention:
    """Compute `attend_reference` without the scores [T, S] in memory.

    Args:
      q: Queries.
      k: Keys.
      v: Values. To merge the result with others, pass arrays of `partial.widen`: then `y` is not
        rounded yet.
      mask: Visible keys of each query.
      score_spec: Scores and dropout. Relative tables are not supported, as they act on values too.
      block_size: Queries, and keys, of a tile.
      skip_masked_tiles: Test each tile's mask; see `TilePass`.
    """
    tile_pass, inputs = _prepare(q, k, v, mask, score_spec, block_size, skip_masked_tiles)
    y, lse = _blockwise(tile_pass, inputs)
    return PartialAttention(y[:, : q.shape[1]], lse[:, :, : q.shape[1]])


def blockwise_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,  # without weights of its own
    lse: Float[Array, "B N T"],  # of all keys
    dy: Float[Array, "B T N Hv"],
    delta: Float[Array, "B N T"],  # of all keys
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    skip_masked_tiles: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # of q, k and v, not rounded
    """Return the terms of some keys in the gradients of attention over more keys.

    Given `lse` and `delta` of all keys, the gradients are sums over keys. So terms of disjoint sets
    of keys add up to the gradients over their union.

    Args:
      q: Queries.
      k: Some of the keys.
      v: Their values.
      mask: Mask of these keys.
      score_spec: Scores and dropout.
      lse: `PartialAttention.lse` of attention over all keys.
      dy: Gradient of the loss in the result of attention.
      delta: `softmax_grad_delta` of attention over all keys.
      block_size: Queries, and keys, of a tile.
      skip_masked_tiles: Test each tile's mask; see `TilePass`.
    """
    tile_pass, inputs = _prepare(q, k, v, mask, score_spec, block_size, skip_masked_tiles)
    padding = inputs.q.shape[1] - q.shape[1]
    # Rows of padding get dy = 0 and delta = 0, so their dS = P * (dP - delta) is 0 for any lse.
    dy = jnp.pad(dy, ((0, 0), (0, padding), (0, 0), (0, 0)))
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, padding)))
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, padding)))
    dq, dk, dv, _ = _gradients(tile_pass, inputs, lse, dy, delta)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def softmax_grad_delta(
    out: PartialAttention,
    rounding_error: jax.Array | None,  # of out.y
    cotangent: PartialAttention,
    operand_dtype: str,
) -> Float[Array, "B N T"]:
    """Return delta = rowsum(y * dy) - d_lse, which the softmax subtracts from each dP of a row.

    It has to cancel the part that all dP = dy v^T of a row have in common. So it uses dy rounded
    like the operand of that product, but all digits of y: an error of y would be added to every
    score of the row alike, and would multiply what the keys have in common in dq.
    """
    dtype = out.lse.dtype
    y, dy = out.y.astype(dtype), round_to_dtype(cotangent.y.astype(dtype), operand_dtype)
    if rounding_error is not None:
        y = y + rounding_error.astype(dtype)
    product = jnp.einsum("BTNH,BTNH->BNT", dy, y)
    # An empty row has lse = -inf, and no gradient.
    return product - jnp.where(jnp.isfinite(out.lse), cotangent.lse, 0)


def _prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    score_spec: ScoreSpec,
    block_size: int,
    skip_masked_tiles: bool,
) -> tuple[TilePass, TileInputs]:
    """Return the arguments of `_blockwise`."""
    operand_dtype = score_spec.operand_dtype_of(q)
    # Scores of a tile are computed from wide arrays, so the spec has to name the operands' dtype.
    score_spec = score_spec._replace(operand_dtype=operand_dtype)
    tiling = make_tiling(mask, q.shape[1], k.shape[1], block_size)
    q = pad_to_tiles(q, tiling=tiling, is_queries=True)
    k = pad_to_tiles(k, tiling=tiling, is_queries=False)
    v = pad_to_tiles(v, tiling=tiling, is_queries=False)
    # All tiles have the same static shape, so one program serves them all: padding keys are hidden
    # by the mask, and the results of padding queries are cut off.
    mask = pad_mask(mask, tiling)

    # A custom_vjp function must not close over traced arrays, such as the table of a bias.
    # closure_convert makes them explicit arguments, which then get gradients. It traces the
    # function once, with the shapes of a tile.
    def compute_scores(q: jax.Array, k: jax.Array, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        return score_spec.compute_scores(q, k, q_pos, k_pos)

    num_queries, num_keys = tiling.queries_per_tile, tiling.keys_per_tile
    dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    score_fn, captured = jax.closure_convert(
        compute_scores,
        q[:, :num_queries].astype(dtype),
        k[:, :num_keys].astype(dtype),
        *tile_mask(mask, tiling, 0, 0).resolved_positions(num_queries, num_keys),
    )
    tile_pass = TilePass(
        score_fn,
        tiling,
        score_spec.dropout_rate,
        score_spec.softmax_dtype,
        operand_dtype,
        skip_masked_tiles,
    )
    return tile_pass, TileInputs(q, k, v, mask, score_spec.dropout_rngs, tuple(captured))


# JAX cannot differentiate a `fori_loop` whose bounds are traced, as they are here where a causal
# mask or a window skips tiles. And the derivative of a loop of fixed length would save the scores
# of every tile, all of [T, S].
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(tile_pass: TilePass, inputs: TileInputs) -> PartialAttention:
    y, lse = _attend(tile_pass, inputs)
    return PartialAttention(y.astype(inputs.v.dtype), lse)


def _attend(tile_pass: TilePass, inputs: TileInputs) -> PartialAttention:  # y not rounded
    """Run the forward pass, one block of queries after the other."""
    tiling, dtype = tile_pass.tiling, tile_pass.softmax_dtype
    # Arrays of `widen` carry no more digits than this: they were cast up to get wide gradients.
    inputs = cast_operands(inputs, tile_pass.operand_dtype)
    value_head_dim = inputs.v.shape[-1]
    q_blocks = split_blocks(inputs.q, tiling.queries_per_tile)
    k_blocks = split_blocks(inputs.k, tiling.keys_per_tile)
    v_blocks = split_blocks(inputs.v, tiling.keys_per_tile)

    def attend_query_block(block: tuple[Index, jax.Array]) -> tuple[jax.Array, jax.Array]:
        query_block, q_block = block
        b, n, num_queries, _ = q_block.shape

        def add_key_tile(key_block: Index, state: Any) -> Any:
            total, maximum, y = state
            tile = compute_tile(
                tile_pass,
                q_block,
                k_blocks[key_block],
                inputs.mask,
                inputs.dropout_rngs,
                inputs.captured,
                query_block,
                key_block,
            )
            scores = jnp.where(tile.visible, tile.scores, -jnp.inf)
            new_maximum = jnp.maximum(maximum, scores.max(-1))
            # While nothing is visible the maximum is -inf, and -inf - -inf is NaN.
            finite = jnp.where(jnp.isfinite(new_maximum), new_maximum, 0)
            # Rounded like the operand of the product with v, so that values are divided by the sum
            # of exactly the weights that they were multiplied by.
            weights = jnp.exp(scores - finite[..., None])
            weights = round_to_dtype(weights, tile_pass.operand_dtype)
            # exp(s - m_old) exp(m_old - m_new) = exp(s - m_new). In the first tile with a visible
            # key m_old is -inf and the factor 0, which keeps the zeros of the start.
            rescale = jnp.exp(maximum - finite)
            tile_y = dropped_weighted_values(
                tile_pass, weights, v_blocks[key_block], tile.dropout_rngs
            )
            # Dropout acts on the numerator only: the sum is over all weights.
            total = total * rescale + weights.sum(-1)
            y = y * rescale[..., None].astype(y.dtype) + tile_y.astype(y.dtype)
            return total, new_maximum, y

        def body(key_block: Index, state: Any) -> Any:
            add_tile = functools.partial(add_key_tile, key_block)
            return add_unless_masked(
                tile_pass, inputs.mask, query_block, key_block, add_tile, state
            )

        # The softmax over no keys: l = 0, m = -inf, y = 0.
        start = (
            jnp.zeros((b, n, num_queries), dtype),
            jnp.full((b, n, num_queries), -jnp.inf, dtype),
            jnp.zeros((b, n, num_queries, value_head_dim), dtype),
        )
        first, end = tiling.key_block_range(query_block)
        total, maximum, y = jax.lax.fori_loop(first, end, body, start)
        # Divided once for each row, not in each tile (Dao 2023, FlashAttention-2, section 3.1).
        is_nonempty = total > 0
        safe_total = jnp.where(is_nonempty, total, 1)
        y = jnp.where(is_nonempty[..., None], y / safe_total[..., None], 0)
        # -inf is the log of an empty sum: `merge_partials` gives such a row no share.
        return y, jnp.where(is_nonempty, maximum + jnp.log(safe_total), -jnp.inf)

    # `map` runs one block after the other, so that only one tile of scores exists at a time.
    y, lse = jax.lax.map(attend_query_block, (jnp.arange(tiling.num_query_blocks), q_blocks))
    return PartialAttention(join_blocks(y), jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1))


def cast_operands(inputs: TileInputs, dtype: str) -> TileInputs:
    """Return the inputs with queries, keys and values in another dtype."""
    return inputs._replace(
        q=inputs.q.astype(dtype), k=inputs.k.astype(dtype), v=inputs.v.astype(dtype)
    )


class Residuals(NamedTuple):
    """What the forward pass saves for the backward pass."""

    inputs: TileInputs
    out: PartialAttention
    rounding_error: jax.Array | None  # of out.y
    dtypes: tuple[jax.Array, ...]  # empty arrays with the dtypes of the gradients of q, k and v


def _forward(tile_pass: TilePass, inputs: TileInputs) -> tuple[PartialAttention, Residuals]:
    y, lse = _attend(tile_pass, inputs)
    # The rounding error is saved for delta, in the dtype of y: together they have twice the digits.
    y, rounding_error = split_high_low(y, inputs.v.dtype)
    out = PartialAttention(y, lse)
    # A residual of custom_vjp has to be an array. q, k and v are saved in the narrow dtype.
    dtypes = tuple(jnp.zeros((0,), x.dtype) for x in (inputs.q, inputs.k, inputs.v))
    narrow = cast_operands(inputs, tile_pass.operand_dtype)
    return out, Residuals(narrow, out, rounding_error, dtypes)


def _backward(
    tile_pass: TilePass, residuals: Residuals, cotangent: PartialAttention
) -> tuple[TileInputs]:
    inputs, out, rounding_error, dtypes = residuals
    delta = softmax_grad_delta(out, rounding_error, cotangent, tile_pass.operand_dtype)
    *grads, d_captured = _gradients(tile_pass, inputs, out.lse, cotangent.y, delta)
    dq, dk, dv = (grad.astype(empty.dtype) for grad, empty in zip(grads, dtypes, strict=True))
    # The arrays of a mask are integers and booleans, and random keys have no gradient either.
    no_gradient: Any = None
    return (TileInputs(dq, dk, dv, no_gradient, None, d_captured),)


def _gradients(
    tile_pass: TilePass,
    inputs: TileInputs,
    lse: Float[Array, "B N T"],
    dy: Float[Array, "B T N Hv"],
    delta: Float[Array, "B N T"],
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:  # of q, k, v (not rounded) and of `captured`
    """Run the backward pass, one block of keys after the other (Dao et al. 2022, algorithm 4)."""
    tiling, dtype = tile_pass.tiling, tile_pass.sum_dtype
    num_queries = tiling.queries_per_tile
    inputs, dy = cast_operands(inputs, tile_pass.operand_dtype), dy.astype(tile_pass.operand_dtype)

    def split_rows(x: Float[Array, "B N T"]) -> Float[Array, "blocks B N num_queries"]:
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, num_queries), 2, 0)

    def zeros_for_sum(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, dtype))

    def add(total: jax.Array, term: jax.Array) -> jax.Array:
        return total + term.astype(total.dtype)

    # lse = -inf in rows without a visible key: any finite number will do, the mask hides them.
    delta = split_rows(delta)
    lse = split_rows(jnp.where(jnp.isfinite(lse), lse, 0))
    q_blocks = split_blocks(inputs.q, num_queries)
    dy_blocks = split_blocks(dy, num_queries)

    def add_key_block(carry: Any, block: tuple[Index, jax.Array, jax.Array]) -> Any:
        key_block, k_block, v_block = block

        def add_query_tile(query_block: Index, state: Any) -> Any:
            dq, d_captured, dk, dv = state
            tile = compute_tile(
                tile_pass,
                q_blocks[query_block],
                k_block,
                inputs.mask,
                inputs.dropout_rngs,
                inputs.captured,
                query_block,
                key_block,
                backward=True,
            )
            # exp(score - lse) is the normalized weight: the running maximum and sum of the forward
            # pass are not needed again.
            weights = jnp.exp(tile.scores - lse[query_block][..., None])
            # Masked after the exponential: a hidden score may be far above lse, and its inf is
            # dropped here. Nothing differentiates this line, so no NaN comes of it.
            weights = jnp.where(tile.visible, weights, 0)
            # This vjp gives dV = P^T dY and dP = dY V^T, through dropout.
            _, values_vjp = jax.vjp(
                lambda w, x: dropped_weighted_values(tile_pass, w, x, tile.dropout_rngs),
                weights,
                v_block.astype(dtype),
            )
            d_weights, tile_dv = values_vjp(dy_blocks[query_block].astype(dtype))
            # The derivative of the softmax. delta has what all keys of the row contribute, so that
            # no tile needs the weights of another.
            d_scores = weights * (d_weights - delta[query_block][..., None])
            tile_dq, tile_dk, tile_d_captured = tile.scores_vjp(d_scores)
            # In place: XLA reuses the memory of a loop's carry.
            dq = dq.at[query_block].add(tile_dq)
            d_captured = jax.tree.map(add, d_captured, tile_d_captured)
            return dq, d_captured, add(dk, tile_dk), add(dv, tile_dv)

        def body(query_block: Index, state: Any) -> Any:
            add_tile = functools.partial(add_query_tile, query_block)
            return add_unless_masked(
                tile_pass, inputs.mask, query_block, key_block, add_tile, state
            )

        start = (*carry, zeros_for_sum(k_block), zeros_for_sum(v_block))
        first, end = tiling.query_block_range(key_block)
        dq, d_captured, dk, dv = jax.lax.fori_loop(first, end, body, start)
        return (dq, d_captured), (dk, dv)

    # dq and the gradients of `captured` get terms from every block of keys, so they are carried;
    # dk and dv of a block are complete after its visit.
    start = zeros_for_sum(q_blocks), jax.tree.map(zeros_for_sum, inputs.captured)
    key_blocks = (
        jnp.arange(tiling.num_key_blocks),
        split_blocks(inputs.k, tiling.keys_per_tile),
        split_blocks(inputs.v, tiling.keys_per_tile),
    )
    (dq, d_captured), (dk, dv) = jax.lax.scan(add_key_block, start, key_blocks)
    # Rounded once: terms of every tile have been added in the wide dtype.
    d_captured = jax.tree.map(lambda x, like: x.astype(like.dtype), d_captured, inputs.captured)
    return join_blocks(dq), join_blocks(dk), join_blocks(dv), d_captured


_blockwise.defvjp(_forward, _backward)

"""Attention of one block of queries at a time to all keys.

For selections of keys that depend on all scores of a query, or on all keys. Scores exist only while
their block is processed, so memory is linear in T.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

QUERY_BLOCK_SIZE = 128

SAVED_QUERY_BLOCK_RESIDUALS = "kept of a block of queries"
"""Checkpoint name of the values that the backward pass reads instead of recomputing them."""


def map_query_blocks(
    attend: Callable[..., jax.Array],
    queries: tuple[Shaped[Array, "B T ..."], ...],
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> Shaped[Array, "B T ..."]:
    """Apply `attend(block_index, *blocks [B, R, ...]) -> [B, R, ...]` to one block after the other.

    The last block is padded with zeros, and its results are cut off. The backward pass recomputes
    each block, except values named `SAVED_QUERY_BLOCK_RESIDUALS`.
    """
    length = queries[0].shape[1]
    block_length = min(block_size, length)
    num_blocks = -(-length // block_length)

    def split(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "blocks B R ..."]:
        padding = [(0, 0), (0, num_blocks * block_length - length)] + [(0, 0)] * (x.ndim - 2)
        blocks = jnp.pad(x, padding).reshape(x.shape[0], num_blocks, block_length, *x.shape[2:])
        return jnp.moveaxis(blocks, 1, 0)

    policy = jax.checkpoint_policies.save_only_these_names(SAVED_QUERY_BLOCK_RESIDUALS)
    attend_block = jax.checkpoint(attend, policy=policy)
    blocks = jnp.arange(num_blocks), *map(split, queries)
    y = jnp.moveaxis(jax.lax.map(lambda block: attend_block(*block), blocks), 0, 1)
    return y.reshape(y.shape[0], num_blocks * block_length, *y.shape[3:])[:, :length]


def softmax_where(
    scores: Float[Array, "... S"],
    where: Bool[Array, "... S"],
) -> tuple[Float[Array, "... S"], Float[Array, "..."]]:
    """Return softmax weights over the entries where `where` is True, and their log-sum-exp.

    A row without such entries gets zero weights, -inf and no gradient.
    """
    # -inf and not a low number: exp gives exactly 0, and a row without entries is recognized.
    scores = jnp.where(where, scores, -jnp.inf)
    # The maximum cancels in the weights, so no gradient has to pass through it.
    max_score = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    max_score = jnp.where(jnp.isfinite(max_score), max_score, 0)
    exp_scores = jnp.exp(scores - max_score)
    total = exp_scores.sum(-1, keepdims=True)
    has_entries = total > 0
    total = jnp.where(has_entries, total, 1)
    # Divided before the product with the values, which rounds: after it, the gradients through
    # numerator and denominator would not cancel.
    return exp_scores / total, jnp.where(has_entries, max_score + jnp.log(total), -jnp.inf)[..., 0]

"""The tables of relative positions, and what they add to scores and results (Shaw et al. 2018).

What stands inside the softmax: how scores are made of queries, keys and positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from transformer.layers.precise_einsum import DTypeLike, accumulation_dtype, precise_einsum


class RelativeTables(struct.PyTreeNode):
    """The tables a^K and a^V of one layer.

    Rows are picked by products with zeros and ones: the gradient of a product is a product, where
    that of a look-up for each head, query and key would be slow to add up.
    """

    keys: jax.Array  # [R, H]
    values: jax.Array  # [R, H of values]

    def score_terms(
        self,
        q: jax.Array,  # [B, T, N, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the scores
    ) -> jax.Array:  # [B, N, T, S]
        """q_i . a^K_ij: what the table adds to the scores (equation 4)."""
        picks, narrow = self.one_hot_distances(query_positions, key_positions), self.keys.dtype
        every = precise_einsum("BTNH,RH->BNTR", q, self.keys, narrow, dtype)
        return precise_einsum("BNTR,BTSR->BNTS", every, picks, narrow, dtype)

    def value_terms(
        self,
        weights: jax.Array,  # [B, N, T, S]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the result
    ) -> jax.Array:  # [B, T, N, H of values]
        """sum over j of weight_ij a^V_ij: what the table adds to the result (equation 3)."""
        picks, narrow = self.one_hot_distances(query_positions, key_positions), self.values.dtype
        by_distance = precise_einsum("BNTS,BTSR->BNTR", weights, picks, narrow, dtype)
        return precise_einsum("BNTR,RH->BTNH", by_distance, self.values, narrow, dtype)

    def one_hot_distances(
        self,
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B or 1, T, S, R]
        """A one at the row of each query's and key's distance, zeros elsewhere."""
        rows = len(self.keys)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        row = jnp.clip(distance + rows // 2, 0, rows - 1)
        return jax.nn.one_hot(row, rows, dtype=self.keys.dtype)


ScoreFn = Callable[[jax.Array, jax.Array, DTypeLike, DTypeLike], jax.Array]
"""q [B, T, N, H], k [B, S, K, H], the dtype of the operands of products, the dtype of the scores ->
scores [B, N, T, S]."""


BiasFn = Callable[[jax.Array, jax.Array], jax.Array]
"""Positions of queries [B or 1, T] and keys [B or 1, S] -> what scores gain [B or 1, N, T, S]."""


def dot_product_scores(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, N, T, S]
    """q k^T, where each G = N / K heads of queries share one of keys: as G T queries of it.

    See `contract` for the dtypes.
    """
    b, t, n, h = q.shape
    s, heads = k.shape[1:3]
    if n == heads:  # the same sum; without the merging of axes XLA's CPU compiler copies less
        return precise_einsum("BTNH,BSNH->BNTS", q, k, operand_dtype, dtype)
    grouped = q.reshape(b, t, heads, n // heads, h).transpose(0, 2, 3, 1, 4)
    merged = grouped.reshape(b, heads, -1, h)  # [B, K, G T, H]
    return precise_einsum("BKTH,BSKH->BKTS", merged, k, operand_dtype, dtype).reshape(b, n, t, s)


def weighted_values(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H of values]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, T, N, H of values]
    """The sums of the values under the weights; see `contract` for the dtypes."""
    b, n, t, s = weights.shape
    heads = v.shape[2]
    if n == heads:
        return precise_einsum("BNTS,BSNH->BTNH", weights, v, operand_dtype, dtype)
    merged = weights.reshape(b, heads, -1, s)  # [B, K, G T, S]
    y = precise_einsum("BKTS,BSKH->BKTH", merged, v, operand_dtype, dtype).reshape(b, n, t, -1)
    return y.swapaxes(1, 2)


class ScoreSpec(NamedTuple):
    """How queries and keys score each other, and what becomes of the weights."""

    scale: float
    score_fn: ScoreFn = dot_product_scores
    """How queries and keys meet, if not as products."""
    bias: BiasFn | None = None
    """What scores gain by the positions of query and key."""
    relative_tables: RelativeTables | None = None
    """Vectors that keys and values gain by their distance."""
    soft_cap: float = 0.0
    """c of c tanh(score / c), which keeps scores below c (Gemma Team 2024, section 2); 0: none."""
    softmax_dtype: str = "float32"
    dropout_rate: float = 0.0
    """Of dropout of the weights."""
    operand_dtype: str = ""
    """Dtype of the operands of products, where queries, keys and values are given wider than that,
    for results and gradients that are not rounded yet (`widen`). Empty: theirs."""
    dropout_rngs: jax.Array | None = None  # [B] random keys of that dropout; None: none

    @property
    def dot_product_only(self) -> bool:
        """Whether scores are products alone."""
        return self._of_products and not self.soft_cap

    @property
    def soft_capped(self) -> bool:
        """Whether scores are products under a soft cap."""
        return self._of_products and self.soft_cap > 0

    @property
    def _of_products(self) -> bool:
        return (
            self.score_fn is dot_product_scores
            and self.bias is None
            and self.relative_tables is None
        )

    def compute_scores(
        self,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, S, K, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B, N, T, S] of the softmax's dtype
        """Before the mask."""
        operands = self.operand_dtype_of(q)
        dtype = accumulation_dtype(operands, self.softmax_dtype)
        scores = self.score_fn(q, k, operands, dtype)
        if self.relative_tables is not None:
            scores = scores + self.relative_tables.score_terms(
                q, query_positions, key_positions, dtype
            )
        # The scores are scaled, not the queries, which 16 bits would round once more.
        scores = scores.astype(self.softmax_dtype) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            gain = self.bias(query_positions, key_positions)
            scores = scores + gain.astype(self.softmax_dtype)
        return scores

    def operand_dtype_of(self, x: jax.Array) -> str:
        """Return the dtype that products are computed from, of queries, keys or values `x`."""
        return self.operand_dtype or x.dtype.name

    def widen(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple["ScoreSpec", tuple[jax.Array, jax.Array, jax.Array]]:
        """Return the scoring and the arrays for results and gradients that are not rounded.

        The arrays are in the dtype of sums, and the scoring still multiplies them as they were
        given. Several results can then be merged, and gradients added, and rounded once.
        """
        operands = self.operand_dtype_of(q)
        dtype = accumulation_dtype(operands, self.softmax_dtype)
        given = q.astype(dtype), k.astype(dtype), v.astype(dtype)
        return self._replace(operand_dtype=operands), given

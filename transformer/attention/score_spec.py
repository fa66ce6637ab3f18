"""Scores inside the softmax, and the static settings that all backends share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from transformer.layers.precise_einsum import DTypeLike, accumulation_dtype, precise_einsum

if TYPE_CHECKING:  # position_bias.py imports this module
    from transformer.attention.position_bias import RelativeTables

ScoreFn = Callable[[jax.Array, jax.Array, DTypeLike, DTypeLike], jax.Array]
"""q [B, T, N, H], k [B, S, K, H], dtype of the operands of products, dtype of the scores -> scores
[B, N, T, S]."""

BiasFn = Callable[[jax.Array, jax.Array], jax.Array]
"""Query positions [B or 1, T], key positions [B or 1, S] -> bias [B or 1, N, T, S] of scores."""


def dot_product_scores(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, N, T, S]
    """Return q k^T; `precise_einsum` explains the dtypes.

    The G = N / K query heads of a group share a key head: they are computed as G T queries of it.
    """
    b, t, n, h = q.shape
    s, num_kv_heads = k.shape[1:3]
    if n == num_kv_heads:  # the same sum, for which XLA's CPU compiler copies less
        return _einsum("BTNH,BSNH->BNTS", q, k, operand_dtype, dtype)
    grouped = q.reshape(b, t, num_kv_heads, n // num_kv_heads, h).transpose(0, 2, 3, 1, 4)
    merged = grouped.reshape(b, num_kv_heads, -1, h)  # [B, K, G T, H]
    return _einsum("BKTH,BSKH->BKTS", merged, k, operand_dtype, dtype).reshape(b, n, t, s)


def weighted_values(
    weights: jax.Array,  # [B, N, T, S]
    v: jax.Array,  # [B, S, K, H of values]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, T, N, H of values]
    """Return the weighted sums of the values; `precise_einsum` explains the dtypes."""
    b, n, t, s = weights.shape
    num_kv_heads = v.shape[2]
    if n == num_kv_heads:
        return _einsum("BNTS,BSNH->BTNH", weights, v, operand_dtype, dtype)
    merged = weights.reshape(b, num_kv_heads, -1, s)  # [B, K, G T, S]
    y = _einsum("BKTS,BSKH->BKTH", merged, v, operand_dtype, dtype).reshape(b, n, t, -1)
    return y.swapaxes(1, 2)


def _einsum(
    spec: str, a: jax.Array, b: jax.Array, operand_dtype: DTypeLike, dtype: DTypeLike
) -> jax.Array:
    """Call `precise_einsum`, unless all dtypes are the same and there is nothing to round."""
    if a.dtype == b.dtype == operand_dtype == dtype:
        return jnp.einsum(spec, a, b)
    return precise_einsum(spec, a, b, operand_dtype, dtype)


class ScoreSpec(NamedTuple):
    """Scores of queries and keys, and dropout of the attention weights."""

    scale: float
    """Factor of the scores."""
    score_fn: ScoreFn = dot_product_scores
    """Unscaled scores of queries and keys."""
    bias: BiasFn | None = None
    """Term that depends on the positions of query and key."""
    relative_tables: "RelativeTables | None" = None
    """Vectors added to keys and values by distance."""
    soft_cap: float = 0.0
    """c of c tanh(score / c), which limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    softmax_dtype: str = "float32"
    """Dtype of the scores and of the softmax."""
    dropout_rate: float = 0.0
    """Fraction of the attention weights that is dropped."""
    operand_dtype: str = ""
    """Dtype of the operands of products, if the arrays are wider than that because their results
    and gradients must not be rounded yet (see `widen`). Empty: the dtype of the arrays."""
    dropout_rngs: jax.Array | None = None  # [B] random keys; None: no dropout

    @property
    def dot_product_only(self) -> bool:
        """Return True if scores are dot products and nothing else."""
        return self.soft_cap == 0 and self._dot_product_before_cap

    @property
    def soft_capped(self) -> bool:
        """Return True if scores are dot products with a soft cap."""
        return self.soft_cap > 0 and self._dot_product_before_cap

    @property
    def _dot_product_before_cap(self) -> bool:
        has_terms = self.bias is not None or self.relative_tables is not None
        return self.score_fn is dot_product_scores and not has_terms

    def compute_scores(
        self,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, S, K, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B, N, T, S] of softmax_dtype
        """Return the scores, without the mask."""
        operand_dtype = self.operand_dtype_of(q)
        dtype = jnp.promote_types(operand_dtype, self.softmax_dtype)
        scores = self.score_fn(q, k, operand_dtype, dtype)
        if self.relative_tables is not None:
            positions = query_positions, key_positions
            scores = scores + self.relative_tables.score_terms(q, *positions, dtype)
        # The scores are scaled, not the queries: scaled 16-bit queries would be rounded once more.
        scores = scores.astype(self.softmax_dtype) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            scores = scores + self.bias(query_positions, key_positions).astype(self.softmax_dtype)
        return scores

    def operand_dtype_of(self, x: jax.Array) -> str:
        """Return the dtype of the operands of products with `x`: queries, keys or values."""
        return self.operand_dtype or x.dtype.name

    def widen(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple["ScoreSpec", tuple[jax.Array, jax.Array, jax.Array]]:
        """Return a spec and arrays whose results and gradients are not rounded.

        The arrays are cast to the dtype of sums, and the spec still rounds the operands of products
        to their old dtype. So several results can be merged, and gradients added, and rounded once.
        """
        operand_dtype = self.operand_dtype_of(q)
        dtype = accumulation_dtype(operand_dtype, self.softmax_dtype)
        wide = q.astype(dtype), k.astype(dtype), v.astype(dtype)
        return self._replace(operand_dtype=operand_dtype), wide

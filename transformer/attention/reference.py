"""The formula of softmax attention, with all scores in memory: the oracle of every backend.

attend_reference(q, k, v) = softmax(scores(q, k) under the mask) v
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.position_bias import BiasFn, RelativeTables
from transformer.layers.activations import cap_logits
from transformer.layers.basic import dropout
from transformer.layers.precise_einsum import DTypeLike, accumulation_dtype, precise_einsum

ScoreFn = Callable[[jax.Array, jax.Array, DTypeLike, DTypeLike], jax.Array]
"""q [B, T, N, H], k [B, S, K, H], dtype of the operands of products, dtype of the scores -> scores
[B, N, T, S]."""


def dot_product_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> Float[Array, "B N T S"]:
    """Return q k^T; `precise_einsum` explains the dtypes."""
    b, t, n, h = q.shape
    s, num_kv_heads = k.shape[1:3]
    if n == num_kv_heads:  # the same sum, for which XLA's CPU compiler copies less
        return precise_einsum("BTNH,BSNH->BNTS", q, k, operand_dtype, dtype)
    # The G = N / K query heads of a group share a key head: G T queries of one head are one matrix
    # product, and the keys are neither repeated nor read G times.
    grouped = q.reshape(b, t, num_kv_heads, n // num_kv_heads, h).transpose(0, 2, 3, 1, 4)
    merged = grouped.reshape(b, num_kv_heads, -1, h)  # [B, K, G T, H]
    return precise_einsum("BKTH,BSKH->BKTS", merged, k, operand_dtype, dtype).reshape(b, n, t, s)


def weighted_values(
    weights: Float[Array, "B N T S"],
    v: Float[Array, "B S K Hv"],
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> Float[Array, "B T N Hv"]:
    """Return the weighted sums of the values; heads and dtypes as in `dot_product_scores`."""
    b, n, t, s = weights.shape
    num_kv_heads = v.shape[2]
    if n == num_kv_heads:
        return precise_einsum("BNTS,BSNH->BTNH", weights, v, operand_dtype, dtype)
    # The same grouping as in `dot_product_scores`.
    merged = weights.reshape(b, num_kv_heads, -1, s)  # [B, K, G T, S]
    y = precise_einsum("BKTS,BSKH->BKTH", merged, v, operand_dtype, dtype).reshape(b, n, t, -1)
    return y.swapaxes(1, 2)


class ScoreSpec(NamedTuple):
    """Scores of queries and keys, and dropout of the attention weights."""

    scale: float
    """Factor of the scores."""
    score_fn: ScoreFn = dot_product_scores
    """Unscaled scores of queries and keys."""
    bias: BiasFn | None = None
    """Term that depends on the positions of query and key."""
    relative_tables: RelativeTables | None = None
    """Vectors added to keys and values by distance."""
    soft_cap: float = 0.0
    """Soft cap c: c tanh(score / c) limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    softmax_dtype: str = "float32"
    """Dtype of the scores and of the softmax."""
    dropout_rate: float = 0.0
    """Fraction of the attention weights that is dropped."""
    operand_dtype: str = ""
    """Dtype of the operands of products, if the arrays are wider than that because their results
    and gradients must not be rounded yet (see `partial.widen`). Empty: the dtype of the arrays."""
    dropout_rngs: Key[Array, "B"] | None = None  # None: no dropout

    @property
    def is_dot_product(self) -> bool:
        """True if scores are dot products, perhaps with a soft cap, and nothing else."""
        has_terms = self.bias is not None or self.relative_tables is not None
        return self.score_fn is dot_product_scores and not has_terms

    def compute_scores(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        query_positions: Int[Array, "#B T"],
        key_positions: Int[Array, "#B S"],
    ) -> Float[Array, "B N T S"]:  # of softmax_dtype
        """Return the scores, without the mask."""
        operand_dtype = self.operand_dtype_of(q)
        # Products of 16-bit operands are summed in the dtype of the softmax: the sum of H products
        # is not rounded before the softmax, whose exponential turns absolute into relative errors.
        dtype = accumulation_dtype(operand_dtype, self.softmax_dtype)
        scores = self.score_fn(q, k, operand_dtype, dtype)
        if self.relative_tables is not None:
            scores = scores + self.relative_tables.score_terms(
                q, query_positions, key_positions, dtype
            )
        # The scores are scaled, not the queries: scaled 16-bit queries would be rounded once more.
        scores = scores.astype(self.softmax_dtype) * self.scale
        # The cap acts on the product alone: capped, ALiBi's bias would stop growing with distance.
        scores = cap_logits(scores, self.soft_cap)
        if self.bias is not None:
            scores = scores + self.bias(query_positions, key_positions).astype(self.softmax_dtype)
        return scores

    def operand_dtype_of(self, x: jax.Array) -> str:
        """Return the dtype of the operands of products with `x`: queries, keys or values."""
        return self.operand_dtype or x.dtype.name


def attend_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,
    sink_logits: Float[Array, "N"] | None = None,
    edit_weights: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N T S"]]:
    """Return softmax(scores under the mask) v (Vaswani et al. 2017, equation 1).

    A query without a visible key gets zeros and no gradient.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    query_positions, key_positions = mask.resolved_positions(num_queries, num_keys)
    scores = score_spec.compute_scores(q, k, query_positions, key_positions)
    # One mask for all heads, broadcast when it is applied.
    visible = dense_mask(mask, num_queries, num_keys)[:, None]
    # The most negative finite number, since -inf gives NaN in a row without a visible key.
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    # jax.nn.softmax subtracts the maximum of a row first, so that no exponential overflows.
    if sink_logits is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = softmax_with_sinks(scores, sink_logits)
    # The softmax of such a row is uniform. Most masks cannot have one, which is known at compile
    # time and saves a pass over the weights.
    if mask.may_have_empty_rows(num_queries, num_keys):
        weights = jnp.where(visible.any(-1, keepdims=True), weights, 0)
    if edit_weights is not None:
        weights = edit_weights(weights)
    operand_dtype = score_spec.operand_dtype_of(v)
    dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    # Dropout acts on the copy that weights the values; the returned weights sum to 1.
    dropped = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs)
    y = weighted_values(dropped.astype(dtype), v, operand_dtype, dtype)
    if score_spec.relative_tables is not None:
        # Vectors by distance are added to values as well (Shaw et al. 2018, equation 3).
        y = y + score_spec.relative_tables.value_terms(
            dropped.astype(dtype), query_positions, key_positions, dtype
        )
    # Rounded once, after all terms.
    return y.astype(v.dtype), weights


def softmax_with_sinks(
    scores: Float[Array, "B N T S"],
    sink_logits: Float[Array, "N"],
) -> Float[Array, "B N T S"]:
    """Return the softmax over the scores and the sink, without the sink's own weight."""
    column = sink_logits.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]

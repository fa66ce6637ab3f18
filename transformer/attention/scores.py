"""Scores of an MLP with one hidden layer (Bahdanau et al. 2015).

How well a key answers a query: dot, scaled dot, bilinear and additive scores.

A score is a map of the query, a map of the key (whose result is what a cache keeps), and how the
two meet: as a product, which every form of attention computes, or through an MLP.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from transformer.attention.config import (
    AdditiveScore,
    AttentionScore,
    BilinearScore,
    ScaledDotScore,
    score_head_dim,
)
from transformer.layers.precise_einsum import DTypeLike

if TYPE_CHECKING:
    from flax import linen as nn

    from transformer.attention.score_spec import ScoreFn
    from transformer.context import ModelContext


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def additive_scores(
    score_vector: jax.Array,  # [N, A]
    q: jax.Array,  # [B, T, N, A]
    k: jax.Array,  # [B, S, K, A]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, N, T, S]
    """vector . tanh(q + k) for each head, query and key, computed in `dtype`.

    There are no products of matrices, whose operands would have to be narrow: `operand_dtype` is
    there as `Scoring.score_fn` gives it.

    The hidden layers [B, T, S, N, A] are computed again in the backward pass: kept, they would be
    A times as large as the scores.
    """
    b, t, n, width = q.shape
    s, heads = k.shape[1:3]
    score_vector, q, k = (each.astype(dtype) for each in (score_vector, q, k))
    grouped = q.reshape(b, t, 1, heads, n // heads, width)
    hidden = jnp.tanh(grouped + k[:, None, :, :, None])
    weights = score_vector.reshape(1, 1, 1, heads, n // heads, width)
    return jnp.moveaxis((hidden * weights).sum(-1).reshape(b, t, s, n), -1, 1)


def score_scale(score: AttentionScore, head_dim: int) -> float:
    """What products of queries and keys are multiplied by."""
    return 1 / math.sqrt(head_dim) if isinstance(score, ScaledDotScore) else 1.0


def transform_queries(
    module: nn.Module,
    q: jax.Array,  # [B, T, N, H]
    score: AttentionScore,
    context: ModelContext,
) -> jax.Array:  # [B, T, N, H where they meet]
    """What of a query meets the keys; declares W."""
    if not isinstance(score, BilinearScore | AdditiveScore):
        return q
    return _map_heads(module, "score_query", q, "heads", score, context)


def transform_keys(
    module: nn.Module,
    k: jax.Array,  # [B, S, K, H]
    score: AttentionScore,
    context: ModelContext,
) -> jax.Array:  # [B, S, K, H where they meet]
    """What of a key meets the queries; declares U."""
    if not isinstance(score, AdditiveScore):
        return k
    return _map_heads(module, "score_key", k, "kv_heads", score, context)


def make_score_fn(
    module: nn.Module,
    score: AttentionScore,
    num_heads: int,  # N
    head_dim: int,  # of queries and keys where they meet
    context: ModelContext,
) -> ScoreFn:
    """How queries and keys meet: as products, or through an MLP, of which it declares w."""
    from transformer.attention.score_spec import dot_product_scores

    pass  # DROPPED
    from transformer.layers.params import declare_weight

    if not isinstance(score, AdditiveScore):
        return dot_product_scores
    init = context.initialization.matrix_initializer({"score": head_dim})
    outputs, dtype = {"heads": num_heads, "score": head_dim}, context.precision.parameters
    vector = declare_weight(module, "score_vector", outputs=outputs, init=init, dtype=dtype)
    return functools.partial(additive_scores, vector)


def _map_heads(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, N, H]
    axis: str,
    score: AttentionScore,
    shared: ModelContext,
) -> jax.Array:  # [B, T, N, H where they meet]
    """Each head through a matrix of its own."""
    import jax.numpy as jnp

    from transformer.layers.params import declare_weight

    heads, head = x.shape[2:]
    inputs, outputs = {"head": head}, {"score": score_head_dim(score, head)}
    init, dtype = shared.initialization.matrix_initializer(inputs), shared.precision.parameters
    stack = {axis: heads}
    w = declare_weight(
        module, name, stack=stack, inputs=inputs, outputs=outputs, init=init, dtype=dtype
    )
    return jnp.einsum("BTNH,NHA->BTNA", x, w.astype(shared.precision.compute))

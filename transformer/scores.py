"""How well a key answers a query: dot, scaled dot, bilinear and additive scores.

A score is a map of the query, a map of the key (whose result is what a cache keeps), and how the
two meet: as a product, which every form of attention computes, or through an MLP.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from transformer.checks import check_at_least

if TYPE_CHECKING:
    import jax
    from flax import linen as nn

    from transformer.attend import ScoreFn
    from transformer.shared import ModelContext


@dataclasses.dataclass(frozen=True)
class ScaledDotScore:
    """q . k / sqrt(H): of unit variance where the entries are (Vaswani et al. 2017, 3.2.1)."""


@dataclasses.dataclass(frozen=True)
class DotScore:
    """q . k (Luong et al. 2015, equation 8, `dot`)."""


@dataclasses.dataclass(frozen=True)
class BilinearScore:
    """q W k, with a matrix for each head (Luong et al. 2015, equation 8, `general`)."""


@dataclasses.dataclass(frozen=True)
class AdditiveScore:
    """w . tanh(W q + U k), an MLP for each head (Bahdanau et al. 2015, appendix A.1.2)."""

    hidden_dim: int = 0
    """Width of the hidden layer; 0 means that of queries."""

    def __post_init__(self) -> None:
        check_at_least("additive_score.hidden", self.hidden_dim, 0)


AttentionScore = ScaledDotScore | DotScore | BilinearScore | AdditiveScore


def score_head_dim(score: AttentionScore, head_dim: int) -> int:
    """How wide queries and keys are where they meet, for heads of width H."""
    return (score.hidden_dim or head_dim) if isinstance(score, AdditiveScore) else head_dim


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
    from transformer.attend import dot_product_scores
    from transformer.attend.additive import additive_scores
    from transformer.weights import declare_weight

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

    from transformer.weights import declare_weight

    heads, head = x.shape[2:]
    inputs, outputs = {"head": head}, {"score": score_head_dim(score, head)}
    init, dtype = shared.initialization.matrix_initializer(inputs), shared.precision.parameters
    stack = {axis: heads}
    w = declare_weight(
        module, name, stack=stack, inputs=inputs, outputs=outputs, init=init, dtype=dtype
    )
    return jnp.einsum("BTNH,NHA->BTNA", x, w.astype(shared.precision.compute))

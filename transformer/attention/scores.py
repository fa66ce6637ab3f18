"""Scores that are more than dot products, bilinear and additive, and sinks.

A score is a map of the query, a map of the key (whose result a cache stores) and a function of the
two. Dot products have neither map; see `reference.py`.

A sink is one more key per head, with a learned score and a value of zero: a query that matches no
key can put its weight there (Agarwal et al. 2025, section 2.2).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer.attention.reference import ScoreFn
from transformer.layers.basic import declare_weight
from transformer.layers.precise_einsum import DTypeLike
from transformer.model_context import ModelContext
from transformer.validation import NonNegativeFloat, NonNegativeInt, Settings


@dataclasses.dataclass(frozen=True)
class ScaledDotScore(Settings):
    """q . k / sqrt(H), of unit variance if q and k are (Vaswani et al. 2017, section 3.2.1)."""

    divisor: NonNegativeFloat = 0.0
    """Width to take the root of in place of H (Gemma 2's `query_pre_attn_scalar`). 0: H."""

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores: a sum of H terms of variance 1 has variance H."""
        return (self.divisor or head_dim) ** -0.5

    def width(self, head_dim: int) -> int:
        """Return the width of transformed queries and keys, for heads of width H."""
        return head_dim


@dataclasses.dataclass(frozen=True)
class DotScore(Settings):
    """q . k (Luong et al. 2015, equation 8, `dot`)."""

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores: 1."""
        return 1.0

    def width(self, head_dim: int) -> int:
        """Return the width of transformed queries and keys: H."""
        return head_dim


@dataclasses.dataclass(frozen=True)
class BilinearScore(Settings):
    """q W k with one matrix W per head (Luong et al. 2015, equation 8, `general`)."""

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores: 1."""
        return 1.0

    def width(self, head_dim: int) -> int:
        """Return the width of transformed queries and keys: H."""
        return head_dim


@dataclasses.dataclass(frozen=True)
class AdditiveScore(Settings):
    """w . tanh(W q + U k), one MLP per head (Bahdanau et al. 2015, appendix A.1.2)."""

    hidden_dim: NonNegativeInt = 0
    """Width of the hidden layer. 0: the width of a query head."""

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores: 1."""
        return 1.0

    def width(self, head_dim: int) -> int:
        """Return A, the width of transformed queries and keys, for heads of width H."""
        return self.hidden_dim or head_dim


AttentionScore = ScaledDotScore | DotScore | BilinearScore | AdditiveScore

SCALED_DOT = ScaledDotScore()
"""The usual score."""


def transform_queries(
    module: nn.Module,
    q: Float[Array, "B T N H"],
    score: BilinearScore | AdditiveScore,
    context: ModelContext,
) -> Float[Array, "B T N A"]:
    """Declare W; return W q for each head. A is H for a bilinear score."""
    return _transform_heads(module, "score_query", q, "heads", score, context)


def transform_keys(
    module: nn.Module,
    k: Float[Array, "B S K H"],
    score: AdditiveScore,
    context: ModelContext,
) -> Float[Array, "B S K A"]:
    """Declare U; return U k for each head."""
    return _transform_heads(module, "score_key", k, "kv_heads", score, context)


def _transform_heads(
    module: nn.Module,
    name: str,
    x: Float[Array, "B T N H"],
    axis: str,
    score: BilinearScore | AdditiveScore,
    context: ModelContext,
) -> Float[Array, "B T N A"]:
    """Multiply each head by a matrix of its own."""
    num_heads, head_dim = x.shape[2:]
    inputs, outputs = {"head": head_dim}, {"score": score.width(head_dim)}
    weight = declare_weight(
        module,
        name,
        stack={axis: num_heads},
        inputs=inputs,
        outputs=outputs,
        init=context.initialization.matrix_initializer(inputs),
        dtype=context.precision.parameters,
    )
    return jnp.einsum("BTNH,NHA->BTNA", x, weight.astype(context.precision.compute))


def make_additive_score_fn(
    module: nn.Module,
    num_heads: int,  # N
    hidden_dim: int,  # A
    context: ModelContext,
) -> ScoreFn:
    """Declare w; return the score function w . tanh(q + k) of transformed queries and keys."""
    vector = declare_weight(
        module,
        "score_vector",
        outputs={"heads": num_heads, "score": hidden_dim},
        init=context.initialization.matrix_initializer({"score": hidden_dim}),
        dtype=context.precision.parameters,
    )
    return functools.partial(additive_scores, vector)


# The hidden layers [B, T, S, N, A] are A times as large as the scores, so the backward pass
# recomputes them.
@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def additive_scores(
    score_vector: Float[Array, "N A"],
    q: Float[Array, "B T N A"],
    k: Float[Array, "B S K A"],
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> Float[Array, "B N T S"]:
    """Return w . tanh(q + k) for each head, query and key (Bahdanau et al. 2015).

    Computed in `dtype`. It contains no matrix product, so `operand_dtype`, which is part of the
    signature of a `ScoreFn`, is unused.
    """
    b, t, n, width = q.shape
    s, num_kv_heads = k.shape[1:3]
    score_vector, q, k = score_vector.astype(dtype), q.astype(dtype), k.astype(dtype)
    grouped = q.reshape(b, t, 1, num_kv_heads, n // num_kv_heads, width)
    hidden = jnp.tanh(grouped + k[:, None, :, :, None])
    weights = score_vector.reshape(1, 1, 1, num_kv_heads, n // num_kv_heads, width)
    return jnp.moveaxis((hidden * weights).sum(-1).reshape(b, t, s, n), -1, 1)


def declare_sink_logits(
    module: nn.Module, num_heads: int, context: ModelContext
) -> Float[Array, "N"]:
    """Declare the logits of attention sinks, initially 0: the score of a key orthogonal to q."""
    return declare_weight(
        module,
        "sinks",
        outputs={"heads": num_heads},
        init=nn.initializers.zeros,
        dtype=context.precision.parameters,
    )

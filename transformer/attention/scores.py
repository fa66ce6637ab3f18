"""Scores that are more than dot products: bilinear, additive, and terms of the positions.

A score is a map of the query, a map of the key (whose result a cache stores) and a function of the
two. Dot products have neither map; see `attend.py`.

A sink is one more key per head, with a learned score and a value of zero: a query that matches no
key can put its weight there (Agarwal et al. 2025, section 2.2).
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.attend import ScoreFn, ScoreSpec
from transformer.attention.attention_config import (
    AdditiveScore,
    AttentionConfig,
    BilinearScore,
    score_head_dim,
)
from transformer.attention.backends.tiling import PartialAttention
from transformer.attention.mixer import MixerInputs, ScoreFlops
from transformer.attention.position_bias import position_terms
from transformer.attention.position_config import RelativePositions
from transformer.layers.basic import declare_weight
from transformer.layers.precise_einsum import DTypeLike
from transformer.model_context import ModelContext


def transform_queries(
    module: nn.Module,
    q: jax.Array,  # [B, T, N, H]
    score: BilinearScore | AdditiveScore,
    context: ModelContext,
) -> jax.Array:  # [B, T, N, A]
    """Declare W; return W q for each head. A is H for a bilinear score."""
    return _transform_heads(module, "score_query", q, "heads", score, context)


def transform_keys(
    module: nn.Module,
    k: jax.Array,  # [B, S, K, H]
    score: AdditiveScore,
    context: ModelContext,
) -> jax.Array:  # [B, S, K, A]
    """Declare U; return U k for each head."""
    return _transform_heads(module, "score_key", k, "kv_heads", score, context)


def add_score_terms(
    module: nn.Module,
    score_spec: ScoreSpec,
    config: AttentionConfig,
    context: ModelContext,
    query_head_dim: int,  # A
    inputs: MixerInputs | None,  # of the mixer; None: no position terms
) -> ScoreSpec:
    """Declare position tables and score weights of `module`; return the spec with their terms."""
    if inputs is not None:
        head_dim = config.resolved_head_dim(context.d_model)
        terms = position_terms(
            module,
            config.position,
            context,
            num_heads=config.num_heads,
            key_head_dim=head_dim,
            value_head_dim=config.value_head_dim or head_dim,
            shared_bias=inputs.shared_bias,
        )
        score_spec = score_spec._replace(**terms._asdict())
    if not isinstance(config.score, AdditiveScore):
        return score_spec
    score_fn = make_additive_score_fn(module, config.num_heads, query_head_dim, context)
    return score_spec._replace(score_fn=score_fn)


def count_score_flops(config: AttentionConfig, width: int, length: int) -> ScoreFlops:
    """Return FLOPs per token of full attention, between activations.

    An additive score counts as one product of its hidden layer and a vector for each key.
    """
    head_dims = config.score_head_dim(width) + (
        config.value_head_dim or config.resolved_head_dim(width)
    )
    per_key, per_query = config.num_heads * head_dims, 0  # multiplications
    if isinstance(config.position, RelativePositions):
        num_distances = config.position.num_distances
        per_key += config.num_heads * 2 * num_distances
        per_query = config.num_heads * head_dims * num_distances
    full, causal = 2 * (per_key * length + per_query), per_key * (length + 1) + 2 * per_query
    return ScoreFlops(full=full, causal=causal)


def make_additive_score_fn(
    module: nn.Module,
    num_heads: int,  # N
    hidden_dim: int,  # A
    context: ModelContext,
) -> ScoreFn:
    """Declare w; return the score function w . tanh(q + k) of transformed queries and keys."""
    init = context.initialization.matrix_initializer({"score": hidden_dim})
    outputs, dtype = {"heads": num_heads, "score": hidden_dim}, context.precision.parameters
    vector = declare_weight(module, "score_vector", outputs=outputs, init=init, dtype=dtype)
    return functools.partial(additive_scores, vector)


# The hidden layers [B, T, S, N, A] are A times as large as the scores, so the backward pass
# recomputes them.
@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def additive_scores(
    score_vector: jax.Array,  # [N, A]
    q: jax.Array,  # [B, T, N, A]
    k: jax.Array,  # [B, S, K, A]
    operand_dtype: DTypeLike,
    dtype: DTypeLike,
) -> jax.Array:  # [B, N, T, S]
    """Return w . tanh(q + k) for each head, query and key (Bahdanau et al. 2015).

    Computed in `dtype`. It contains no matrix product, so `operand_dtype`, which is part of the
    signature of a `ScoreFn`, is unused.
    """
    b, t, n, width = q.shape
    s, num_kv_heads = k.shape[1:3]
    score_vector, q, k = (each.astype(dtype) for each in (score_vector, q, k))
    grouped = q.reshape(b, t, 1, num_kv_heads, n // num_kv_heads, width)
    hidden = jnp.tanh(grouped + k[:, None, :, :, None])
    weights = score_vector.reshape(1, 1, 1, num_kv_heads, n // num_kv_heads, width)
    return jnp.moveaxis((hidden * weights).sum(-1).reshape(b, t, s, n), -1, 1)


def _transform_heads(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, N, H]
    axis: str,
    score: BilinearScore | AdditiveScore,
    context: ModelContext,
) -> jax.Array:  # [B, T, N, A]
    """Multiply each head by a matrix of its own."""
    num_heads, head_dim = x.shape[2:]
    inputs, outputs = {"head": head_dim}, {"score": score_head_dim(score, head_dim)}
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


def declare_sink_logits(
    module: nn.Module, num_heads: int, context: ModelContext
) -> jax.Array:  # [N]
    """Declare the logits of attention sinks, initially 0: the score of a key orthogonal to q."""
    zeros, dtype = nn.initializers.zeros, context.precision.parameters
    return declare_weight(module, "sinks", outputs={"heads": num_heads}, init=zeros, dtype=dtype)


def softmax_with_sinks(
    scores: jax.Array,  # [B, N, T, S]
    sink_logits: jax.Array,  # [N]
) -> jax.Array:  # [B, N, T, S]
    """Return the softmax over the scores and the sink, without the sink's own weight."""
    column = sink_logits.astype(scores.dtype)[None, :, None, None]
    column = jnp.broadcast_to(column, (*scores.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]


def add_sinks(
    attention: PartialAttention,
    sink_logits: jax.Array,  # [N]
) -> PartialAttention:
    """Add the sinks to attention that is already normalized.

    With the sink's score s, each softmax sum grows from exp(lse) to exp(lse) + exp(s), so the
    result shrinks by exp(lse - logaddexp(lse, s)).
    """
    lse = jnp.logaddexp(attention.lse, sink_logits.astype(attention.lse.dtype)[None, :, None])
    fraction = jnp.exp(attention.lse - lse).swapaxes(1, 2)[..., None]
    return attention._replace(y=(attention.y * fraction).astype(attention.y.dtype), lse=lse)

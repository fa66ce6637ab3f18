"""Linear maps of attention: to queries, keys and values in heads (with RoPE), and back.

Every attention mixer uses them with the same parameter names, so the weights of one fit another.
"""

import functools
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from transformer.attention.attention_config import (
    AdditiveScore,
    AttentionConfig,
    BilinearScore,
    MultiHeadConfig,
)
from transformer.attention.position_config import RoPE
from transformer.attention.rope import apply_rope
from transformer.attention.scores import transform_keys, transform_queries
from transformer.layers.basic import Norm, apply_linear
from transformer.model_context import ModelContext


class QKV(NamedTuple):
    """Queries, keys and values, ready for the scores."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H of values]


def project_qkv(
    module: nn.Module,
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # [B or 1, T]
    config: Any,  # a MultiHeadConfig, perhaps with a field `position`
    context: ModelContext,
    suffix: str = "",  # of the parameter names
) -> QKV:
    """Project queries, keys and values of self-attention, and apply RoPE if configured."""
    q = project_queries(module, x, config, context, suffix)
    k = project_keys(module, x, config, context, suffix)
    v = project_values(module, x, config, context, suffix)
    position = getattr(config, "position", None)
    if isinstance(position, RoPE):
        q, k = (apply_rope(each, positions, position) for each in (q, k))
    return QKV(q, k, v)


def project_queries(
    module: nn.Module,
    x: jax.Array,  # [B, T, D]
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, T, N, H]
    """Project and normalize queries and apply the score's query map, without RoPE."""
    query_axes, _ = head_axes(config, context.d_model)
    q = _project_heads(module, f"query{suffix}", x, query_axes, config, context)
    score = config.score if isinstance(config, AttentionConfig) else None
    if isinstance(score, BilinearScore | AdditiveScore):
        q = transform_queries(module, q, score, context)
    return q


def project_keys(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H]
    """Project and normalize keys and apply the score's key map, without RoPE."""
    _, key_axes = head_axes(config, context.d_model)
    k = _project_heads(module, f"key{suffix}", x, key_axes, config, context)
    if isinstance(config, AttentionConfig) and isinstance(config.score, AdditiveScore):
        k = transform_keys(module, k, config.score, context)
    return k


def project_values(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H of values]
    """Project values."""
    _, axes = head_axes(config, context.d_model)
    if isinstance(config, AttentionConfig) and config.value_head_dim:
        axes = axes | {"head": config.value_head_dim}
    return _project_heads(module, f"value{suffix}", x, axes, config, context, normalize=False)


def project_output(
    module: nn.Module,
    y: jax.Array,  # [B, T, N, H of values]
    config: MultiHeadConfig,
    context: ModelContext,
) -> jax.Array:  # [B, T, D]
    """Map the concatenated heads to the model's width."""
    inputs, outputs = {"heads": y.shape[2], "head": y.shape[3]}, {"embed": context.d_model}
    bias = config.bias if config.output_bias is None else config.output_bias
    return apply_linear(module, "output", y, inputs, outputs, context, bias=bias, residual=True)


@functools.cache
def head_axes(config: MultiHeadConfig, d_model: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the logical output axes of queries, and of keys and values. Not to be mutated."""
    head_dim = config.resolved_head_dim(d_model)
    return (
        {"heads": config.num_heads, "head": head_dim},
        {"kv_heads": config.resolved_num_kv_heads, "head": head_dim},
    )


def _project_heads(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, D]
    axes: dict[str, int],  # of the heads, then of their width
    config: MultiHeadConfig,
    context: ModelContext,
    normalize: bool = True,
) -> jax.Array:  # [B, T, N or K, H]
    """Project x to heads and apply `qk_norm` to each; heads share one gain."""
    embed = {"embed": context.d_model}
    heads = apply_linear(module, name, x, embed, axes, context, bias=config.bias)
    heads = context.constrain(heads, ("batch", "length", next(iter(axes)), None))
    if config.qk_norm is None or not normalize:
        return heads
    return Norm(config.qk_norm, context, "head", parent=module, name=f"{name}_norm")(heads)

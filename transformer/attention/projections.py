"""Linear maps of attention: to queries, keys and values in heads, and back.

Every attention mixer uses them with the same parameter names, so the weights of one fit another.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.config import MultiHeadConfig
from transformer.attention.position_config import RoPE
from transformer.attention.rope import apply_rope
from transformer.context import ModelContext
from transformer.layers.norms import Norm
from transformer.layers.params import apply_linear, declare_linear


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
    v = project_values(module, x, config, context, suffix=suffix)
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
    """Project and normalize queries, without RoPE."""
    query_axes, _ = _head_axes(config, context.d_model)
    q = _project_heads(module, f"query{suffix}", x, query_axes, config, context)
    return _normalize_heads(module, f"query{suffix}_norm", q, config, context)


def project_keys(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H]
    """Project and normalize keys, without RoPE."""
    _, key_axes = _head_axes(config, context.d_model)
    k = _project_heads(module, f"key{suffix}", x, key_axes, config, context)
    return _normalize_heads(module, f"key{suffix}_norm", k, config, context)


def project_values(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    head_dim: int = 0,  # H of values; 0: that of queries
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H of values]
    """Project values."""
    _, axes = _head_axes(config, context.d_model)
    if head_dim:
        axes = axes | {"head": head_dim}
    return _project_heads(module, f"value{suffix}", x, axes, config, context)


def project_output(
    module: nn.Module,
    y: jax.Array,  # [B, T, N, H of values]
    config: MultiHeadConfig,
    context: ModelContext,
) -> jax.Array:  # [B, T, D]
    """Map the concatenated heads to the model's width."""
    inputs, outputs = {"heads": y.shape[2], "head": y.shape[3]}, {"embed": context.d_model}
    return apply_linear(
        module, "output", y, inputs, outputs, context, bias=config.bias, residual=True
    )


def attend_with_absorbed_projections(
    module: nn.Module,
    q: jax.Array,  # [B, n, N, H] of a few queries
    x: jax.Array,  # [B, S, D]
    attend_fn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],  # attention of q, k and v
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, n, N, H]
    """Return `attend_fn` of q and the keys and values of x, without projecting x.

    q . (W x) = (q W) . x, and a mean of W x is W times the mean of x. For a few queries that costs
    less than projecting all of x, with the same weights. The key bias adds a constant to all scores
    of a query, which the softmax ignores. Keys must have neither a norm nor RoPE.
    """
    _, axes = _head_axes(config, context.d_model)
    embed, group_size = {"embed": context.d_model}, config.num_heads // axes["kv_heads"]
    (key, _), (value, bias) = (
        declare_linear(module, f"{name}{suffix}", embed, axes, context, bias=config.bias)
        for name in ("key", "value")
    )
    key, value = (jnp.repeat(each, group_size, axis=1) for each in (key, value))
    # A value entry of 1 returns the sum of the weights, the factor of the value bias: dropout
    # leaves it different from 1.
    ones = jnp.ones((*x.shape[:2], 1), x.dtype)
    mean = attend_fn(
        jnp.einsum("BTNH,DNH->BTND", q, key),
        x[:, :, None],
        jnp.concatenate([x, ones], axis=-1)[:, :, None],
    )
    y = jnp.einsum("BTND,DNH->BTNH", mean[..., :-1], value)
    if bias is not None:
        y = y + mean[..., -1:] * jnp.repeat(bias, group_size, axis=0)[None, None]
    return y


@functools.cache
def _head_axes(config: MultiHeadConfig, d_model: int) -> tuple[dict[str, int], dict[str, int]]:
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
) -> jax.Array:  # [B, T, N or K, H]
    embed = {"embed": context.d_model}
    heads = apply_linear(module, name, x, embed, axes, context, bias=config.bias)
    if context.constrain.mesh is None:
        return heads
    return context.constrain(heads, ("batch", "length", next(iter(axes)), None))


def _normalize_heads(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, N or K, H]
    config: MultiHeadConfig,
    context: ModelContext,
) -> jax.Array:  # [B, T, N or K, H]
    """Apply `qk_norm` to each head. Heads share one gain."""
    if config.qk_norm is None:
        return x
    return Norm(config.qk_norm, context.precision, "head", parent=module, name=name)(x)

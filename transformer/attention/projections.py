"""Queries, keys and values in heads: what every mixer of attention makes of its tokens, and joins.

All of them name their weights alike, so those of one can be given to another.
"""

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
    """As the scores take them."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H of values]


def project_qkv(
    module: nn.Module,
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # [B or 1, T]
    config: Any,  # a HeadsConfig; its `position`, if it has one, turns queries and keys
    context: ModelContext,
    suffix: str = "",
) -> QKV:
    """Queries, keys and values of the tokens' own; `suffix` ends the names of the weights."""
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
    """Projected and normed, not turned yet."""
    axes = {"heads": config.num_heads, "head": config.resolved_head_dim(context.d_model)}
    q = _projected(module, f"query{suffix}", x, axes, config, context)
    return _normed(module, f"query{suffix}_norm", q, config, context)


def project_keys(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H]
    """Projected and normed, not turned yet."""
    axes = {
        "kv_heads": config.resolved_num_kv_heads,
        "head": config.resolved_head_dim(context.d_model),
    }
    k = _projected(module, f"key{suffix}", x, axes, config, context)
    return _normed(module, f"key{suffix}_norm", k, config, context)


def project_values(
    module: nn.Module,
    x: jax.Array,  # [B, S, D]
    config: MultiHeadConfig,
    context: ModelContext,
    head_dim: int = 0,  # H of values; 0: that of queries
    suffix: str = "",
) -> jax.Array:  # [B, S, K, H of values]
    """Projected."""
    axes = {
        "kv_heads": config.resolved_num_kv_heads,
        "head": head_dim or config.resolved_head_dim(context.d_model),
    }
    return _projected(module, f"value{suffix}", x, axes, config, context)


def attend_with_absorbed_projections(
    module: nn.Module,
    q: jax.Array,  # [B, n, N, H] of a few queries
    x: jax.Array,  # [B, S, D]
    attend_fn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],  # attention of q to k and v
    config: MultiHeadConfig,
    context: ModelContext,
    suffix: str = "",
) -> jax.Array:  # [B, n, N, H]
    """What `attend_fn` finds with the keys and values of x, without making those of every token.

    q . (W x) is (q W) . x, and an average of W x is W times the average of x: for a few queries
    that is less work than projecting all of x, with the same weights. A bias of the keys adds the
    same to all scores of a query, which no softmax sees. Not for keys that are normed or turned.
    """
    embed, width = {"embed": context.d_model}, config.resolved_head_dim(context.d_model)
    axes, group = (
        {"kv_heads": config.resolved_num_kv_heads, "head": width},
        config.num_heads // config.resolved_num_kv_heads,
    )
    made = [
        declare_linear(module, f"{name}{suffix}", embed, axes, context, bias=config.bias)
        for name in ("key", "value")
    ]
    (key, _), (value, bias) = made
    key, value = (jnp.repeat(each, group, axis=1) for each in (key, value))
    # One more entry of each value sums the weights: what the bias is multiplied by.
    ones = jnp.ones((*x.shape[:2], 1), x.dtype)
    found = attend_fn(
        jnp.einsum("BTNH,DNH->BTND", q, key),
        x[:, :, None],
        jnp.concatenate([x, ones], axis=-1)[:, :, None],
    )
    y = jnp.einsum("BTND,DNH->BTNH", found[..., :-1], value)
    if bias is not None:
        y = y + found[..., -1:] * jnp.repeat(bias, group, axis=0)[None, None]
    return y


def project_output(
    module: nn.Module,
    y: jax.Array,  # [B, T, N, H of values]
    config: MultiHeadConfig,
    context: ModelContext,
) -> jax.Array:  # [B, T, D]
    """What the heads have looked up, through the output matrix."""
    inputs, outputs = {"heads": y.shape[2], "head": y.shape[3]}, {"embed": context.d_model}
    return apply_linear(
        module, "output", y, inputs, outputs, context, bias=config.bias, residual=True
    )


def _projected(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, D]
    axes: dict[str, int],  # heads, then their width
    config: MultiHeadConfig,
    shared: ModelContext,
) -> jax.Array:  # [B, T, N or K, H]
    made = apply_linear(module, name, x, {"embed": shared.d_model}, axes, shared, bias=config.bias)
    return shared.constrain(made, ("batch", "length", next(iter(axes)), None))


def _normed(
    module: nn.Module,
    name: str,
    x: jax.Array,  # [B, T, N or K, H]
    config: MultiHeadConfig,
    shared: ModelContext,
) -> jax.Array:  # [B, T, N or K, H]
    """Each head's entries normed, with one gain for all heads."""
    if config.qk_norm is None:
        return x
    return Norm(config.qk_norm, shared.precision, "head", parent=module, name=name)(x)

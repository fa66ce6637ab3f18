"""Attention of a few queries with the key and value projections absorbed into the queries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.config import MultiHeadConfig
from transformer.attention.projections import head_axes
from transformer.context import ModelContext
from transformer.layers.basic import declare_linear
from transformer.layers.low_rank import merge_weight


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
    _, axes = head_axes(config, context.d_model)
    embed, group_size = {"embed": context.d_model}, config.num_heads // axes["kv_heads"]
    # The key bias is declared although nothing reads it: so these weights have the names and shapes
    # of an ordinary projection, and can be exchanged with one.
    (key, _), (value, bias) = (
        declare_linear(module, f"{name}{suffix}", embed, axes, context, bias=config.bias)
        for name in ("key", "value")
    )
    # Matrices with a low-rank update are merged: a query would have to go through both factors.
    key, value = (jnp.repeat(merge_weight(each), group_size, axis=1) for each in (key, value))
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

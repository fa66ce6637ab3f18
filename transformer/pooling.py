"""One vector for a whole sequence: that of its first token, or the mean of all."""

from typing import get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.config import Pooling as Pooling
from transformer.config import TransformerConfig
from transformer.linear import apply_linear
from transformer.shared import ModelContext


def check_pooling(pooling: str) -> None:
    """Raises ValueError for a pooling that is not known."""
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"pooling {pooling}: is not known; give one of {known}")


def pool_sequence(
    module: nn.Module,
    x: jax.Array,  # [B, T, D]
    segments: jax.Array | None,  # [B, T] 0 is padding
    pooling: Pooling,
    config: TransformerConfig,
    context: ModelContext,
) -> jax.Array:  # [B, D]
    """The first token's vector (a [CLS] that has attended to everything), or the mean of real ones.

    With `config.pooler` a linear map and tanh follow, as in BERT (Devlin et al. 2019).
    """
    pooled = x[:, :1] if pooling == "first" else masked_mean(x, segments)
    if config.pooler:
        width = {"embed": config.d_model}
        pooled = jnp.tanh(apply_linear(module, "pooler", pooled, width, width, context, bias=True))
    return pooled[:, 0]


def masked_mean(
    x: jax.Array,  # [B, T, D]
    segments: jax.Array | None,  # [B, T] 0 is padding
) -> jax.Array:  # [B, 1, D]
    """The mean over tokens that are no padding; zeros where all are."""
    if segments is None:
        return jnp.mean(x, axis=1, keepdims=True)
    real = (segments != 0).astype(x.dtype)[:, :, None]
    return jnp.sum(x * real, axis=1, keepdims=True) / jnp.maximum(
        jnp.sum(real, 1, keepdims=True), 1
    )

"""Input embeddings: tokens, plus positions and token types where a model has them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.position_config import (
    FREQUENCY_BASE,
    LearnedPositions,
    SinusoidalPositions,
)
from transformer.attention.rope import wrapped_angles
from transformer.attention.rope_scaling import unscaled_frequencies
from transformer.config import TransformerConfig
from transformer.context import ModelContext
from transformer.layers.basic import Norm, declare_weight, dropout, fold_in


def declare_table(
    module: nn.Module,
    name: str,
    inputs: dict[str, int],
    outputs: dict[str, int],
    config: TransformerConfig,
) -> jax.Array:  # [*inputs, *outputs]
    """Declare an embedding table of `module`, with the initial values of embeddings."""

    def init(rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return config.initialization.embedding_initializer()(rng, shape, dtype)

    dtype = config.precision.parameters
    return declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)


def declare_embedding(
    module: nn.Module, name: str, num_rows: int, config: TransformerConfig
) -> jax.Array:  # [V padded, D]
    """Declare a token embedding of `module`."""
    return declare_table(module, name, {"vocab": num_rows}, {"embed": config.d_model}, config)


def embed_tokens(
    module: nn.Module,
    embedding_table: jax.Array,  # [V padded, D]
    tokens: jax.Array,  # [B, T]
    *,
    positions: jax.Array,  # [B or 1, T]
    token_types: jax.Array | None,  # [B, T] below `num_token_types`; None: all 0
    dropout_rngs: jax.Array | None,  # [B]
    config: TransformerConfig,
    context: ModelContext,
) -> jax.Array:  # [B, T, D]
    """Sum token, position and token-type embeddings, then apply norm and dropout.

    Declares the position and token-type tables of `module`.
    """
    # The rows of the table may be sharded, but not D: the gather picks whole rows.
    x = context.constrain(embedding_table, ("vocab", None))[tokens]
    if config.scale_embeddings:
        x = x * math.sqrt(config.d_model)
    if isinstance(config.position_embedding, LearnedPositions):
        sizes = {"positions": config.position_embedding.max_length}, {"embed": config.d_model}
        x = x + declare_table(module, "positions", *sizes, config)[positions]
    elif isinstance(config.position_embedding, SinusoidalPositions):
        x = x + sinusoidal_embedding(positions, config.d_model)
    if config.num_token_types:
        sizes = {"types": config.num_token_types}, {"embed": config.d_model}
        table = declare_table(module, "types", *sizes, config)
        x = x + (table[:1][None] if token_types is None else table[token_types])
    x = x.astype(config.precision.compute)
    if config.embedding_norm is not None:
        x = Norm(config.embedding_norm, config.precision, name="embedding_norm")(x)
    if dropout_rngs is not None:
        # Stream L: streams 0 to L - 1 belong to the layers.
        rngs = fold_in(dropout_rngs, context.num_layers)
        x = dropout(x, config.embedding_dropout, rngs)
    return context.constrain(x, ("batch", "length", None))


def sinusoidal_embedding(
    positions: jax.Array,  # [B or 1, T]
    d_model: int,  # D
) -> jax.Array:  # [B or 1, T, D] float32
    """Return the sinusoids of Vaswani et al. 2017, section 3.5.

    Entry 2i is sin(position / 10000^(2i/D)) and entry 2i + 1 its cosine; wavelengths run from 2 pi
    to 20000 pi. An odd D ends with a sine.
    """
    angles = wrapped_angles(positions, unscaled_frequencies(FREQUENCY_BASE, d_model))
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:2], -1)[..., :d_model]

"""Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017, section 3.5).

Tokens as vectors: a look-up table, and what is added to tell positions and kinds of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.attention.rope_scaling import unscaled_frequencies

if TYPE_CHECKING:
    import jax
import math

import jax
from flax import linen as nn

from transformer.attention.position_config import (
    FREQUENCY_BASE,
    LearnedPositions,
    SinusoidalPositions,
)
from transformer.config import TransformerConfig
from transformer.context import ModelContext
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.norms import Norm
from transformer.layers.params import declare_weight


def sinusoidal_embedding(
    positions: jax.Array,  # [B or 1, T]
    width: int,  # D
) -> jax.Array:  # [B or 1, T, D] float32
    """Entry 2i is sin(position / 10000^(2i/D)), entry 2i + 1 its cosine.

    Wavelengths run from 2 pi to 2 pi * 10000. A width that is odd ends with a sine.
    """
    import jax.numpy as jnp

    from transformer.attention.rope import wrapped_angles

    angles = wrapped_angles(positions, unscaled_frequencies(FREQUENCY_BASE, width))
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:2], -1)[..., :width]


def declare_table(
    module: nn.Module,
    name: str,
    inputs: dict[str, int],
    outputs: dict[str, int],
    config: TransformerConfig,
) -> jax.Array:
    """Declares a table of vectors of `module`, one for each input (or output)."""
    init, dtype = config.initialization.embedding_initializer(), config.precision.parameters
    return declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)


def declare_embedding(
    module: nn.Module, name: str, num_rows: int, config: TransformerConfig
) -> jax.Array:  # [V padded, D]
    """Declares the vectors of a vocabulary."""
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
    """Word + position (+ type), then norm and dropout; declares the tables of `module`."""
    # Rows may be split over devices, but not the vectors in them: tokens pick whole ones.
    x = context.constrain(embedding_table, ("vocab", None))[tokens]
    if config.scale_embeddings:
        x = x * math.sqrt(config.d_model)
    for added in (_places(module, positions, config), _types(module, token_types, config)):
        x = x if added is None else x + added
    x = x.astype(config.precision.compute)
    if config.embedding_norm is not None:
        x = Norm(config.embedding_norm, config.precision, name="embedding_norm")(x)
    x = dropout(x, config.embedding_dropout, fold_in(dropout_rngs, context.num_layers))
    return context.constrain(x, ("batch", "length", None))


def _places(
    module: nn.Module,
    positions: jax.Array,  # [B or 1, T]
    config: TransformerConfig,
) -> jax.Array | None:  # [B or 1, T, D]
    """What the embeddings are to know of positions."""
    if isinstance(config.position_embedding, LearnedPositions):
        rows = {"positions": config.position_embedding.max_length}
        return declare_table(module, "positions", rows, {"embed": config.d_model}, config)[
            positions
        ]
    if isinstance(config.position_embedding, SinusoidalPositions):
        return sinusoidal_embedding(positions, config.d_model)
    return None


def _types(
    module: nn.Module,
    types: jax.Array | None,  # [B, T]
    config: TransformerConfig,
) -> jax.Array | None:  # [B or 1, T or 1, D]
    if not config.num_token_types:
        return None
    rows = {"types": config.num_token_types}
    vectors = declare_table(module, "types", rows, {"embed": config.d_model}, config)
    return vectors[:1][None] if types is None else vectors[types]

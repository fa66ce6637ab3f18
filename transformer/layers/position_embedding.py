"""Embeddings that are added to those of tokens: of absolute positions and of token types."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.position_config import (
    FREQUENCY_BASE,
    LearnedPositions,
    SinusoidalPositions,
)
from transformer.attention.rope import fixed_point_turns, wrapped_product
from transformer.attention.rope_scaling import unscaled_frequencies
from transformer.config import TransformerConfig
from transformer.layers.basic import declare_table


def embed_positions(
    module: nn.Module,
    positions: jax.Array,  # [B or 1, T]
    config: TransformerConfig,
) -> jax.Array:  # [B or 1, T, D]
    """Return learned vectors of `module`, or sinusoids."""
    learned = config.position_embedding
    if not isinstance(learned, LearnedPositions):
        vectors = sinusoidal_embedding(positions, config.d_model)
        if isinstance(learned, SinusoidalPositions) and learned.layout == "halves":
            return jnp.concatenate([vectors[..., 0::2], vectors[..., 1::2]], axis=-1)
        return vectors
    rows, offset = learned.max_length + learned.offset, learned.offset
    table = declare_table(
        module, "positions", {"positions": rows}, {"embed": config.d_model}, config
    )
    return table[positions + offset if offset else positions]


def sinusoidal_embedding(
    positions: jax.Array,  # [B or 1, T]
    d_model: int,  # D
) -> jax.Array:  # [B or 1, T, D] float32
    """Return the sinusoids of Vaswani et al. 2017, section 3.5.

    Entry 2i is sin(position / 10000^(2i/D)) and entry 2i + 1 its cosine; wavelengths run from 2 pi
    to 20000 pi. An odd D ends with a sine.
    """
    frequencies = unscaled_frequencies(FREQUENCY_BASE, d_model)
    angles = wrapped_product(positions, *fixed_point_turns(frequencies))
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:2], -1)[..., :d_model]


def embed_token_types(
    module: nn.Module,
    token_types: jax.Array | None,  # [B, T] below `num_token_types`; None: all 0
    config: TransformerConfig,
) -> jax.Array:  # [B, T, D] or [1, 1, D]
    """Return learned vectors of `module` by token type (Devlin et al. 2019, section 3)."""
    sizes = {"types": config.num_token_types}, {"embed": config.d_model}
    table = declare_table(module, "types", *sizes, config)
    return table[:1][None] if token_types is None else table[token_types]

"""Tokens as vectors: a look-up table, and what is added to tell positions and kinds of tokens."""

import math

import jax
from flax import linen as nn

from transformer.config import TransformerConfig
from transformer.dropout import dropout, fold
from transformer.norms import Norm
from transformer.positions import LearnedPositions, SinusoidalPositions, sinusoid
from transformer.shared import Shared
from transformer.weights import weight


def table(
    module: nn.Module,
    name: str,
    inputs: dict[str, int],
    outputs: dict[str, int],
    config: TransformerConfig,
) -> jax.Array:
    """Declares a table of vectors of `module`, one for each input (or output)."""
    init, dtype = config.initialization.table(), config.precision.parameters
    return weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)


def word_table(
    module: nn.Module, name: str, rows: int, config: TransformerConfig
) -> jax.Array:  # [V padded, D]
    """Declares the vectors of a vocabulary."""
    return table(module, name, {"vocab": rows}, {"embed": config.width}, config)


def embed(
    module: nn.Module,
    words: jax.Array,  # [V padded, D]
    tokens: jax.Array,  # [B, T]
    *,
    positions: jax.Array,  # [B or 1, T]
    types: jax.Array | None,  # [B, T] below `token_types`; None: all 0
    dropout_rngs: jax.Array | None,  # [B]
    config: TransformerConfig,
    shared: Shared,
) -> jax.Array:  # [B, T, D]
    """Word + position (+ type), then norm and dropout; declares the tables of `module`."""
    # Rows may be split over devices, but not the vectors in them: tokens pick whole ones.
    x = shared.constrain(words, ("vocab", None))[tokens]
    if config.embedding_scale:
        x = x * math.sqrt(config.width)
    for added in (_places(module, positions, config), _types(module, types, config)):
        x = x if added is None else x + added
    x = x.astype(config.precision.compute)
    if config.embedding_norm is not None:
        x = Norm(config.embedding_norm, config.precision, name="embedding_norm")(x)
    x = dropout(x, config.dropout, fold(dropout_rngs, shared.layers))
    return shared.constrain(x, ("batch", "length", None))


def _places(
    module: nn.Module,
    positions: jax.Array,  # [B or 1, T]
    config: TransformerConfig,
) -> jax.Array | None:  # [B or 1, T, D]
    """What the embeddings are to know of positions."""
    if isinstance(config.position, LearnedPositions):
        rows = {"positions": config.position.length}
        return table(module, "positions", rows, {"embed": config.width}, config)[positions]
    if isinstance(config.position, SinusoidalPositions):
        return sinusoid(positions, config.width)
    return None


def _types(
    module: nn.Module,
    types: jax.Array | None,  # [B, T]
    config: TransformerConfig,
) -> jax.Array | None:  # [B or 1, T or 1, D]
    if not config.token_types:
        return None
    rows = {"types": config.token_types}
    vectors = table(module, "types", rows, {"embed": config.width}, config)
    return vectors[:1][None] if types is None else vectors[types]

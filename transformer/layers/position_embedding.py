"""Embeddings that are added to those of tokens: of absolute positions and of token types."""

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int

from transformer.layers.angles import fixed_point_turns, unscaled_frequencies, wrapped_product
from transformer.layers.basic import declare_table
from transformer.model_context import ModelContext
from transformer.validation import Bounds, NonNegativeInt, Settings


@dataclasses.dataclass(frozen=True)
class NoPosition:
    """No position information here; attention or the embedding may still have some."""


NO_POSITION = NoPosition()


@dataclasses.dataclass(frozen=True)
class LearnedPositions(Settings):
    """A learned vector per position, added to the embedding (Gehring et al. 2017)."""

    max_length: Annotated[int, Bounds(1, 2**24)] = 1024
    """Longest input, in tokens. Longer ones raise ValueError."""
    offset: NonNegativeInt = 0
    """Rows of the table before that of position 0, which tokens never use. RoBERTa, BART and OPT
    have 2."""


FREQUENCY_BASE = 10_000.0
"""Base of the wavelengths of `SinusoidalPositions`."""


SinusoidLayout = Literal["interleaved", "halves", "tensor2tensor"]


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions(Settings):
    """Sines and cosines of the position, for any length (Vaswani et al. 2017, section 3.5)."""

    layout: SinusoidLayout = "interleaved"
    """Order of the entries: `interleaved` (a sine, its cosine, ...), as in the paper; `halves` (all
    sines, all cosines), as in Marian and Pegasus; `tensor2tensor`: halves whose longest wavelength
    is exactly 20000 pi, and an odd D ends with a zero, as in Tensor2Tensor and fairseq."""
    offset: NonNegativeInt = 0
    """Position of the first token. fairseq's models, such as M2M-100, have 2."""


PositionEmbedding = NoPosition | LearnedPositions | SinusoidalPositions
"""Position information added to the token embedding."""


def embed_positions(
    module: nn.Module,
    positions: Int[Array, "#B T"],
    config: LearnedPositions | SinusoidalPositions,
    context: ModelContext,
) -> Float[Array, "#B T D"]:
    """Return learned vectors of `module`, or sinusoids."""
    if isinstance(config, SinusoidalPositions):
        return sinusoidal_embedding(positions + config.offset, context.d_model, config.layout)
    table = declare_table(
        module,
        "positions",
        inputs={"positions": config.max_length + config.offset},
        outputs={"embed": context.d_model},
        context=context,
    )
    return table[positions + config.offset if config.offset else positions]


def sinusoidal_embedding(
    positions: Int[Array, "#B T"],
    d_model: int,  # D
    layout: SinusoidLayout = "interleaved",
) -> Float32[Array, "#B T D"]:
    """Return the sinusoids of Vaswani et al. 2017, section 3.5.

    Entry 2i is sin(position / 10000^(2i/D)) and entry 2i + 1 its cosine; wavelengths run from 2 pi
    to 20000 pi. An odd D ends with a sine.
    """
    if layout == "tensor2tensor":
        steps = np.arange(d_model // 2) / max(1, d_model // 2 - 1)
        frequencies = FREQUENCY_BASE**-steps
    else:
        frequencies = unscaled_frequencies(FREQUENCY_BASE, d_model)
    angles = wrapped_product(positions, *fixed_point_turns(frequencies))
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    if layout == "interleaved":
        pairs = jnp.stack([sines, cosines], axis=-1)
        return pairs.reshape(*angles.shape[:2], -1)[..., :d_model]
    halves = jnp.concatenate([sines, cosines], axis=-1)[..., :d_model]
    return jnp.pad(halves, ((0, 0), (0, 0), (0, d_model - halves.shape[-1])))


def embed_token_types(
    module: nn.Module,
    token_types: Int[Array, "#B T"] | None,  # below `num_token_types`; None: all 0
    num_token_types: int,
    context: ModelContext,
) -> Float[Array, "#B #T D"]:
    """Return learned vectors of `module` by token type (Devlin et al. 2019, section 3)."""
    table = declare_table(
        module,
        "types",
        inputs={"types": num_token_types},
        outputs={"embed": context.d_model},
        context=context,
    )
    return table[:1][None] if token_types is None else table[token_types]

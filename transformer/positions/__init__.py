"""Where a token stands, one idea a file: what attention knows, and what embeddings are told."""

from typing import TYPE_CHECKING, Any

from transformer.positions.alibi import ALiBi, alibi_bias
from transformer.positions.bucketed import T5RelativeBias, t5_relative_bias
from transformer.positions.learned import LearnedPositions
from transformer.positions.none import NoPosition
from transformer.positions.relative import RelativePositions
from transformer.positions.rotary import RoPE, apply_rope, rope_angles
from transformer.positions.scaling import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    RopeScaling,
    YaRNScaling,
)
from transformer.positions.sinusoidal import SinusoidalPositions, sinusoidal_embedding

if TYPE_CHECKING:
    from transformer.positions.relative_tables import RelativeTables

__all__ = [
    "ALiBi",
    "AttentionPosition",
    "T5RelativeBias",
    "PositionEmbedding",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "RelativePositions",
    "RelativeTables",
    "RoPE",
    "RopeScaling",
    "SinusoidalPositions",
    "YaRNScaling",
    "alibi_bias",
    "t5_relative_bias",
    "rope_angles",
    "apply_rope",
    "sinusoidal_embedding",
]

AttentionPosition = NoPosition | RoPE | RelativePositions | T5RelativeBias | ALiBi
"""What queries and keys know of each other's positions."""

PositionEmbedding = NoPosition | LearnedPositions | SinusoidalPositions
"""What is added to the embeddings to tell positions."""


def __getattr__(name: str) -> Any:
    """Import the tables, which are arrays and need jax, when they are first asked for."""
    if name != "RelativeTables":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformer.positions.relative_tables import RelativeTables

    return RelativeTables

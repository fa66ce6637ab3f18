"""Where a token stands, one idea a file: what attention knows, and what embeddings are told."""

from transformer.positions.alibi import ALiBi, alibi_bias
from transformer.positions.bucketed import BucketedBias, bucketed_bias
from transformer.positions.learned import LearnedPositions
from transformer.positions.none import NoPosition
from transformer.positions.relative import RelativePositions, RelativeTables
from transformer.positions.rotary import Rotary, rotary_angles, rotate
from transformer.positions.scaling import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    Scaling,
    YaRNScaling,
)
from transformer.positions.sinusoidal import SinusoidalPositions, sinusoid

__all__ = [
    "ALiBi",
    "AttentionPosition",
    "BucketedBias",
    "EmbeddingPosition",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "RelativePositions",
    "RelativeTables",
    "Rotary",
    "Scaling",
    "SinusoidalPositions",
    "YaRNScaling",
    "alibi_bias",
    "bucketed_bias",
    "rotary_angles",
    "rotate",
    "sinusoid",
]

AttentionPosition = NoPosition | Rotary | RelativePositions | BucketedBias | ALiBi
"""What queries and keys know of each other's positions."""

EmbeddingPosition = NoPosition | LearnedPositions | SinusoidalPositions
"""What is added to the embeddings to tell positions."""

"""Transformers in pure Flax: models as pure functions of (parameters, inputs)."""

from transformer.attention import AttentionConfig
from transformer.block import BlockConfig
from transformer.config import TransformerConfig
from transformer.feedforward import FeedForwardConfig
from transformer.hardware import Hardware
from transformer.masks import Mask, Pattern
from transformer.mixers import MIXERS, Abilities, Mixer, MixerConfig, MixerOutput
from transformer.model import LanguageModel, ModelOutput
from transformer.norms import NormConfig
from transformer.positions import LearnedPositions, NoPosition, Rotary
from transformer.precision import Precision
from transformer.weights import Initialization

__all__ = [
    "MIXERS",
    "Abilities",
    "AttentionConfig",
    "BlockConfig",
    "FeedForwardConfig",
    "Hardware",
    "Initialization",
    "LanguageModel",
    "LearnedPositions",
    "Mask",
    "Mixer",
    "MixerConfig",
    "MixerOutput",
    "ModelOutput",
    "NoPosition",
    "NormConfig",
    "Pattern",
    "Precision",
    "Rotary",
    "TransformerConfig",
]

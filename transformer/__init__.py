"""Transformers in pure Flax: models as pure functions of (parameters, inputs)."""

from transformer.attention import AttentionConfig
from transformer.block import BlockConfig
from transformer.classifier import Classifier
from transformer.config import EncoderConfig, TransformerConfig
from transformer.encoder_decoder import EncoderDecoder
from transformer.feedforward import FeedForwardConfig
from transformer.hardware import Hardware
from transformer.language_model import LanguageModel
from transformer.masked_language_model import MaskedLanguageModel
from transformer.masks import Mask, Pattern
from transformer.mixers import MIXERS, Abilities, Mixer, MixerConfig, MixerOutput
from transformer.model import Model, ModelOutput
from transformer.norms import NormConfig
from transformer.positions import LearnedPositions, NoPosition, Rotary
from transformer.precision import Precision
from transformer.tagger import Tagger
from transformer.weights import Initialization

__all__ = [
    "MIXERS",
    "Abilities",
    "AttentionConfig",
    "BlockConfig",
    "Classifier",
    "EncoderConfig",
    "EncoderDecoder",
    "FeedForwardConfig",
    "Hardware",
    "Initialization",
    "LanguageModel",
    "LearnedPositions",
    "Mask",
    "MaskedLanguageModel",
    "Mixer",
    "MixerConfig",
    "MixerOutput",
    "Model",
    "ModelOutput",
    "NoPosition",
    "NormConfig",
    "Pattern",
    "Precision",
    "Rotary",
    "Tagger",
    "TransformerConfig",
]

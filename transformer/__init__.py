"""Transformers in pure Flax: models as pure functions of (parameters, inputs)."""

from transformer.attention import AttentionConfig
from transformer.block import BlockConfig
from transformer.classifier import Classifier
from transformer.config import EncoderConfig, TransformerConfig
from transformer.convolution import ConvolutionConfig
from transformer.decoding import generate
from transformer.encoder_decoder import EncoderDecoder
from transformer.feedforward import FeedForwardConfig
from transformer.hardware import Hardware
from transformer.identity import IdentityConfig
from transformer.language_model import LanguageModel
from transformer.masked_language_model import MaskedLanguageModel
from transformer.masks import Mask, Pattern
from transformer.mixers import MIXERS, Abilities, Mixer, MixerConfig, MixerOutput
from transformer.mixture import MixtureConfig
from transformer.model import Model, ModelOutput
from transformer.nonautoregressive import NonAutoregressive
from transformer.norms import NormConfig
from transformer.positions import (
    ALiBi,
    BucketedBias,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    NoPosition,
    NoScaling,
    NTKScaling,
    RelativePositions,
    Rotary,
    SinusoidalPositions,
    YaRNScaling,
)
from transformer.precision import Precision
from transformer.recurrent import (
    BahdanauConfig,
    ChengConfig,
    ElmanConfig,
    GNMTDecoderConfig,
    GNMTEncoderConfig,
    LSTMConfig,
    LuongConfig,
    Seq2SeqConfig,
)
from transformer.scores import AdditiveScore, BilinearScore, DotScore, ScaledDotScore
from transformer.tagger import Tagger
from transformer.variants.bigbird import BigBirdConfig
from transformer.variants.linear_attention import LinearAttentionConfig
from transformer.variants.linformer import LinformerConfig
from transformer.variants.longformer import LongformerConfig
from transformer.variants.performer import PerformerConfig
from transformer.variants.primer import PrimerConfig
from transformer.variants.reformer import ReformerConfig
from transformer.variants.routing_attention import RoutingConfig
from transformer.variants.sliding_window import SlidingWindowConfig
from transformer.variants.sparse import SparseConfig
from transformer.variants.top_k import TopKConfig
from transformer.weights import Initialization

__all__ = [
    "MIXERS",
    "ALiBi",
    "Abilities",
    "AdditiveScore",
    "AttentionConfig",
    "BahdanauConfig",
    "BigBirdConfig",
    "BilinearScore",
    "BlockConfig",
    "BucketedBias",
    "ChengConfig",
    "Classifier",
    "ConvolutionConfig",
    "DotScore",
    "ElmanConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "FeedForwardConfig",
    "GNMTDecoderConfig",
    "GNMTEncoderConfig",
    "Hardware",
    "IdentityConfig",
    "Initialization",
    "LSTMConfig",
    "LanguageModel",
    "LearnedPositions",
    "LinearAttentionConfig",
    "LinearScaling",
    "LinformerConfig",
    "Llama3Scaling",
    "LongformerConfig",
    "LuongConfig",
    "Mask",
    "MaskedLanguageModel",
    "Mixer",
    "MixerConfig",
    "MixerOutput",
    "MixtureConfig",
    "Model",
    "ModelOutput",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "NonAutoregressive",
    "NormConfig",
    "Pattern",
    "PerformerConfig",
    "Precision",
    "PrimerConfig",
    "ReformerConfig",
    "RelativePositions",
    "Rotary",
    "RoutingConfig",
    "ScaledDotScore",
    "Seq2SeqConfig",
    "SinusoidalPositions",
    "SlidingWindowConfig",
    "SparseConfig",
    "Tagger",
    "TopKConfig",
    "TransformerConfig",
    "YaRNScaling",
    "generate",
]

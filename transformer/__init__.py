"""Transformers in pure Flax: models as pure functions of (parameters, inputs)."""

import os

if os.environ.get("TRANSFORMER_TYPECHECK") == "1":  # before the modules that it checks
    from jaxtyping import install_import_hook

    import transformer.shape_types  # noqa: F401

    install_import_hook("transformer", "transformer.shape_types.check")

from transformer.attention.full import AttentionConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.mixer import (
    MIXERS,
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    register_mixer,
)
from transformer.attention.position_bias import ALiBi, RelativePositions, T5RelativeBias
from transformer.attention.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoScaling,
    NTKScaling,
    RoPE,
    YaRNScaling,
)
from transformer.attention.scores import AdditiveScore, BilinearScore, DotScore, ScaledDotScore
from transformer.attention.variants.bigbird import BigBirdConfig
from transformer.attention.variants.gated_delta import GatedDeltaConfig
from transformer.attention.variants.latent_attention import LatentAttentionConfig
from transformer.attention.variants.linear_attention import LinearAttentionConfig
from transformer.attention.variants.linformer import LinformerConfig
from transformer.attention.variants.longformer import LongformerConfig
from transformer.attention.variants.mamba2 import Mamba2Config
from transformer.attention.variants.performer import PerformerConfig
from transformer.attention.variants.primer import PrimerConfig
from transformer.attention.variants.reformer import ReformerConfig
from transformer.attention.variants.routing_attention import RoutingAttentionConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.attention.variants.sparse_transformer import SparseTransformerConfig
from transformer.attention.variants.top_k import TopKConfig
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.cheng import ChengConfig
from transformer.baselines.convolution import ConvolutionConfig
from transformer.baselines.gnmt import GNMTDecoderConfig, GNMTEncoderConfig
from transformer.baselines.identity import IdentityConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.baselines.nonautoregressive import NonAutoregressive
from transformer.baselines.recurrent import ElmanConfig, LSTMConfig
from transformer.generation.generate import generate
from transformer.generation.log_likelihood import log_likelihoods
from transformer.hardware import Hardware
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions, NoPosition, SinusoidalPositions
from transformer.model_context import Initialization
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.feature_classifier import FeatureClassifier
from transformer.models.heads import Classifier, Tagger
from transformer.models.language_model import LanguageModel
from transformer.models.masked_lm import MaskedLanguageModel
from transformer.models.model import Model, ModelOutput, check_params
from transformer.precision import Precision
from transformer.text_embeddings import embed_sequences

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
    "ChengConfig",
    "Classifier",
    "ConvolutionConfig",
    "DotScore",
    "ElmanConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "FeatureClassifier",
    "FeedForwardConfig",
    "GNMTDecoderConfig",
    "GNMTEncoderConfig",
    "GatedDeltaConfig",
    "Hardware",
    "IdentityConfig",
    "Initialization",
    "LSTMConfig",
    "LanguageModel",
    "LatentAttentionConfig",
    "LearnedPositions",
    "LinearAttentionConfig",
    "LinearScaling",
    "LinformerConfig",
    "Llama3Scaling",
    "LongRoPEScaling",
    "LongformerConfig",
    "LuongConfig",
    "Mamba2Config",
    "Mask",
    "MaskPattern",
    "MaskedLanguageModel",
    "Mixer",
    "MixerConfig",
    "MixerInputs",
    "MixerOutput",
    "MoEConfig",
    "Model",
    "ModelOutput",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "NonAutoregressive",
    "NormConfig",
    "PerformerConfig",
    "Precision",
    "PrimerConfig",
    "ReformerConfig",
    "RelativePositions",
    "RoPE",
    "RoutingAttentionConfig",
    "ScaledDotScore",
    "Seq2SeqConfig",
    "SinusoidalPositions",
    "SlidingWindowConfig",
    "SparseTransformerConfig",
    "T5RelativeBias",
    "Tagger",
    "TopKConfig",
    "TransformerConfig",
    "YaRNScaling",
    "check_params",
    "embed_sequences",
    "generate",
    "log_likelihoods",
    "register_mixer",
]

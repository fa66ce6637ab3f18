"""Transformers in pure Flax: models as pure functions of (parameters, inputs).

The names below are imported when they are first asked for: settings can be read, and `--help`
answered, before JAX is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.attention_config import AttentionConfig
    from transformer.block_config import BlockConfig
    from transformer.classifier import Classifier
    from transformer.config import EncoderConfig, TransformerConfig
    from transformer.decoding import generate
    from transformer.encoder_decoder import EncoderDecoder
    from transformer.hardware import Hardware
    from transformer.initialization import Initialization
    from transformer.language_model import LanguageModel
    from transformer.layer_configs import (
        ConvolutionConfig,
        FeedForwardConfig,
        IdentityConfig,
        MixerConfig,
        MoEConfig,
        NormConfig,
    )
    from transformer.masked_language_model import MaskedLanguageModel
    from transformer.masks import Mask, MaskPattern
    from transformer.mixers import Abilities, Mixer, MixerOutput
    from transformer.model import Model, ModelOutput
    from transformer.nonautoregressive import NonAutoregressive
    from transformer.positions import (
        ALiBi,
        LearnedPositions,
        LinearScaling,
        Llama3Scaling,
        NoPosition,
        NoScaling,
        NTKScaling,
        RelativePositions,
        RoPE,
        SinusoidalPositions,
        T5RelativeBias,
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
    from transformer.registry import MIXERS
    from transformer.scores import AdditiveScore, BilinearScore, DotScore, ScaledDotScore
    from transformer.tagger import Tagger
    from transformer.variants.configs import (
        BigBirdConfig,
        LinearAttentionConfig,
        LinformerConfig,
        LongformerConfig,
        PerformerConfig,
        PrimerConfig,
        ReformerConfig,
        RoutingAttentionConfig,
        SlidingWindowConfig,
        SparseTransformerConfig,
        TopKConfig,
    )

_HOMES = {
    "attention_config": ("AttentionConfig",),
    "block_config": ("BlockConfig",),
    "classifier": ("Classifier",),
    "config": ("EncoderConfig", "TransformerConfig"),
    "count_decoding_cost": ("generate",),
    "encoder_decoder": ("EncoderDecoder",),
    "hardware": ("Hardware",),
    "initialization": ("Initialization",),
    "language_model": ("LanguageModel",),
    "layer_configs": (
        "ConvolutionConfig",
        "FeedForwardConfig",
        "IdentityConfig",
        "MixerConfig",
        "MoEConfig",
        "NormConfig",
    ),
    "masked_language_model": ("MaskedLanguageModel",),
    "masks": ("Mask", "MaskPattern"),
    "attention_variants": ("Abilities", "Mixer", "MixerOutput"),
    "recurrent_model": ("Model", "ModelOutput"),
    "nonautoregressive": ("NonAutoregressive",),
    "positions": (
        "ALiBi",
        "T5RelativeBias",
        "LearnedPositions",
        "LinearScaling",
        "Llama3Scaling",
        "NTKScaling",
        "NoPosition",
        "NoScaling",
        "RelativePositions",
        "RoPE",
        "SinusoidalPositions",
        "YaRNScaling",
    ),
    "precision": ("Precision",),
    "recurrent_model": (
        "BahdanauConfig",
        "ChengConfig",
        "ElmanConfig",
        "GNMTDecoderConfig",
        "GNMTEncoderConfig",
        "LSTMConfig",
        "LuongConfig",
        "Seq2SeqConfig",
    ),
    "registry": ("MIXERS",),
    "scores": ("AdditiveScore", "BilinearScore", "DotScore", "ScaledDotScore"),
    "tagger": ("Tagger",),
    "variants.configs": (
        "BigBirdConfig",
        "LinearAttentionConfig",
        "LinformerConfig",
        "LongformerConfig",
        "PerformerConfig",
        "PrimerConfig",
        "ReformerConfig",
        "RoutingAttentionConfig",
        "SlidingWindowConfig",
        "SparseTransformerConfig",
        "TopKConfig",
    ),
}
"""The names of each module."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

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
    "T5RelativeBias",
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
    "MoEConfig",
    "Model",
    "ModelOutput",
    "NTKScaling",
    "NoPosition",
    "NoScaling",
    "NonAutoregressive",
    "NormConfig",
    "MaskPattern",
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
    "Tagger",
    "TopKConfig",
    "TransformerConfig",
    "YaRNScaling",
    "generate",
]


def __getattr__(name: str) -> Any:
    """Import each name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found

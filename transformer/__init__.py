"""Transformers in pure Flax: models as pure functions of (parameters, inputs).

The names below are imported when they are first asked for: settings can be read, and `--help`
answered, before JAX is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer.attention.attention_config import (
        AdditiveScore,
        AttentionConfig,
        BilinearScore,
        DotScore,
        MixerConfig,
        ScaledDotScore,
    )
    from transformer.attention.masks import Mask, MaskPattern
    from transformer.attention.mixer import Abilities, Mixer, MixerInputs, MixerOutput
    from transformer.attention.position_config import (
        ALiBi,
        LearnedPositions,
        NoPosition,
        RelativePositions,
        RoPE,
        SinusoidalPositions,
        T5RelativeBias,
    )
    from transformer.attention.rope_scaling import (
        LinearScaling,
        Llama3Scaling,
        LongRoPEScaling,
        NoScaling,
        NTKScaling,
        YaRNScaling,
    )
    from transformer.attention.variants.bigbird import BigBirdConfig
    from transformer.attention.variants.linear_configs import (
        LinearAttentionConfig,
        LinformerConfig,
        PerformerConfig,
        PrimerConfig,
    )
    from transformer.attention.variants.longformer import LongformerConfig
    from transformer.attention.variants.sliding_window import SlidingWindowConfig
    from transformer.attention.variants.sparse_configs import (
        ReformerConfig,
        RoutingAttentionConfig,
        TopKConfig,
    )
    from transformer.attention.variants.sparse_transformer import SparseTransformerConfig
    from transformer.baselines.baseline_configs import (
        BahdanauConfig,
        ChengConfig,
        ConvolutionConfig,
        ElmanConfig,
        GNMTDecoderConfig,
        GNMTEncoderConfig,
        IdentityConfig,
        LSTMConfig,
        LuongConfig,
        Seq2SeqConfig,
    )
    from transformer.baselines.nonautoregressive import NonAutoregressive
    from transformer.config import BlockConfig, EncoderConfig, Initialization, TransformerConfig
    from transformer.generation.generate import generate
    from transformer.generation.log_likelihood import log_likelihoods
    from transformer.hardware import Hardware
    from transformer.layers.layer_config import FeedForwardConfig, MoEConfig, NormConfig
    from transformer.mixer_registry import MIXERS, register_mixer
    from transformer.models.encoder_decoder import EncoderDecoder
    from transformer.models.feature_classifier import FeatureClassifier
    from transformer.models.heads import Classifier, Tagger
    from transformer.models.language_model import LanguageModel
    from transformer.models.masked_lm import MaskedLanguageModel
    from transformer.models.model import Model, ModelOutput
    from transformer.precision import Precision

_HOMES = {
    "attention.mixer": (
        "Abilities",
        "Mixer",
        "MixerInputs",
        "MixerOutput",
    ),
    "attention.attention_config": (
        "AdditiveScore",
        "AttentionConfig",
        "BilinearScore",
        "DotScore",
        "MixerConfig",
        "ScaledDotScore",
    ),
    "attention.masks": (
        "Mask",
        "MaskPattern",
    ),
    "attention.position_config": (
        "ALiBi",
        "LearnedPositions",
        "NoPosition",
        "RelativePositions",
        "RoPE",
        "SinusoidalPositions",
        "T5RelativeBias",
    ),
    "attention.rope_scaling": (
        "LinearScaling",
        "Llama3Scaling",
        "LongRoPEScaling",
        "NTKScaling",
        "NoScaling",
        "YaRNScaling",
    ),
    "attention.variants.linear_configs": (
        "LinearAttentionConfig",
        "LinformerConfig",
        "PerformerConfig",
        "PrimerConfig",
    ),
    "attention.variants.bigbird": ("BigBirdConfig",),
    "attention.variants.longformer": ("LongformerConfig",),
    "attention.variants.sliding_window": ("SlidingWindowConfig",),
    "attention.variants.sparse_configs": ("ReformerConfig", "RoutingAttentionConfig", "TopKConfig"),
    "attention.variants.sparse_transformer": ("SparseTransformerConfig",),
    "baselines.baseline_configs": (
        "BahdanauConfig",
        "ChengConfig",
        "ConvolutionConfig",
        "ElmanConfig",
        "GNMTDecoderConfig",
        "GNMTEncoderConfig",
        "IdentityConfig",
        "LSTMConfig",
        "LuongConfig",
        "Seq2SeqConfig",
    ),
    "baselines.nonautoregressive": ("NonAutoregressive",),
    "config": (
        "BlockConfig",
        "EncoderConfig",
        "Initialization",
        "TransformerConfig",
    ),
    "generation.generate": ("generate",),
    "generation.log_likelihood": ("log_likelihoods",),
    "hardware": ("Hardware",),
    "layers.layer_config": (
        "FeedForwardConfig",
        "MoEConfig",
        "NormConfig",
    ),
    "models.model": (
        "Model",
        "ModelOutput",
    ),
    "models.encoder_decoder": ("EncoderDecoder",),
    "models.feature_classifier": ("FeatureClassifier",),
    "models.heads": (
        "Classifier",
        "Tagger",
    ),
    "models.language_model": ("LanguageModel",),
    "models.masked_lm": ("MaskedLanguageModel",),
    "precision": ("Precision",),
    "mixer_registry": (
        "MIXERS",
        "register_mixer",
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
    "LongRoPEScaling",
    "LongformerConfig",
    "LuongConfig",
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
    "generate",
    "log_likelihoods",
    "register_mixer",
]


def __getattr__(name: str) -> Any:
    """Import each name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformer.field_docs import document_fields

    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    document_fields(module)
    value = getattr(module, name)
    # Found directly from now on: Python calls `__getattr__` only for names that a module lacks.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

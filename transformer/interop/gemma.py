"""Gemma 1, 2 and 3 (text models).

Llama's layout with scaled embeddings and gains of 1 + weight. Gemma 2 and 3 have norms after the
sublayers too, and layers with a window between layers without; Gemma 2 caps its scores and logits,
Gemma 3 normalizes queries and keys and gives local layers a base of their own for RoPE.
"""

import dataclasses
from typing import Any

from transformer.attention.attention_config import AttentionConfig, ScaledDotScore
from transformer.attention.position_config import RoPE
from transformer.config import BlockConfig, TransformerConfig
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    D_FF,
    Architecture,
    Family,
    Rotary,
    Setting,
    norm,
    read_ropes,
    with_settings,
    write_ropes,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER_SIZES,
    ENDS,
    GATED,
    LAYER,
    NORMS,
    QK_EPSILON,
    QK_NORMS,
    ROTARY_BUFFERS,
    read_windows,
    write_windows,
)
from transformer.layers.layer_config import FeedForwardConfig, NormConfig

RMS = NormConfig(kind="rms_offset")

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATION_NAMES}


def _read_gemma2(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    kinds = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    attention = _with_divisor(fields, config)
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds, window, attention, attention)


def _read_gemma3(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    period = fields.take("sliding_window_pattern")
    kinds = [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config.num_layers)
    ]
    names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    ropes = read_ropes(fields, names, {"full_attention": fields.take("rope_scaling", {})})
    attention = _with_divisor(fields, config)
    everywhere = dataclasses.replace(attention, position=ropes["full_attention"])
    local = dataclasses.replace(attention, position=ropes["sliding_attention"])
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds, window, everywhere, local)


def _with_divisor(fields: Fields, config: TransformerConfig) -> AttentionConfig:
    attention: Any = config.layer_pattern[0].mixer
    divisor = float(fields.take("query_pre_attn_scalar", 0.0))
    return dataclasses.replace(attention, score=ScaledDotScore(divisor))


def _write_gemma2(config: TransformerConfig) -> dict[str, Any]:
    divisor = getattr(getattr(config.layer_pattern[0].mixer, "score", None), "divisor", 0.0)
    divisor = int(divisor) if divisor == int(divisor) else divisor  # an integer in Gemma2Config
    return write_windows(config) | {"query_pre_attn_scalar": divisor}


def _write_gemma3(config: TransformerConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.layer_pattern]
    ropes = {bool(getattr(mixer, "window", 0)): mixer.position for mixer in mixers}
    local, everywhere = ropes.get(True, RoPE()), ropes.get(False, RoPE(theta=1_000_000.0))
    positions = {"full_attention": everywhere, "sliding_attention": local}
    return _write_gemma2(config) | write_ropes(positions)


SANDWICH_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "layers/mixer_output_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "layers/feed_forward_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "layers/feed_forward_output_norm"),
)


SETTINGS = (*DECODER_SIZES, Setting("intermediate_size", D_FF, is_size=True), ATTENTION_BIAS)

GEMMA = Family(
    "gemma",
    (Architecture("GemmaForCausalLM", "language_model"),),
    TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(position=RoPE()),
                feed_forward=FeedForwardConfig(gated=True, bias=False),
                norm=RMS,
            ),
        ),
        final_norm=RMS,
        scale_embeddings=True,
    ),
    (
        *SETTINGS,
        Rotary(),
        # `gelu` is what the first files of Gemma call the approximation.
        Setting("hidden_act", ACTIVATION, choices=ACTIVATIONS | {"gelu": "gelu_tanh"}),
    ),
    (*ENDS, *ATTENTION, *GATED, *NORMS),
    expected={"use_bidirectional_attention": (False,)},
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

GEMMA2 = dataclasses.replace(
    GEMMA,
    model_type="gemma2",
    architectures=(Architecture("Gemma2ForCausalLM", "language_model"),),
    base=with_settings(GEMMA.base, {"layer_pattern.norm_placement": "sandwich"}),
    settings=(
        *SETTINGS,
        Rotary(),
        Setting("hidden_activation", ACTIVATION, choices=ACTIVATIONS),
        Setting("attn_logit_softcapping", "layer_pattern.mixer.soft_cap", null=0.0),
        Setting("final_logit_softcapping", "logit_soft_cap", null=0.0),
    ),
    weights=(*ENDS, *ATTENTION, *GATED, *SANDWICH_NORMS),
    read_rest=_read_gemma2,
    write_rest=_write_gemma2,
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    architectures=(Architecture("Gemma3ForCausalLM", "language_model"),),
    base=with_settings(GEMMA2.base, {"layer_pattern.mixer.qk_norm": RMS}),
    settings=(*(x for x in GEMMA2.settings if not isinstance(x, Rotary)), QK_EPSILON),
    weights=(*ENDS, *ATTENTION, *GATED, *SANDWICH_NORMS, *QK_NORMS),
    read_rest=_read_gemma3,
    write_rest=_write_gemma3,
)

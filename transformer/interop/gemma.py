"""Gemma 1, 2 and 3 (text models).

Llama's layout with scaled embeddings and gains of 1 + weight. Gemma 2 and 3 have norms after the
sublayers too, and layers with a window between layers without; Gemma 2 caps its scores and logits,
Gemma 3 normalizes queries and keys and gives local layers a base of their own for RoPE.
"""

import dataclasses
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.attention.scores import ScaledDotScore
from transformer.interop.family import (
    ACTIVATION_NAMES,
    Architecture,
    Family,
    norm,
    read_ropes,
    write_ropes,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ENDS,
    GATED,
    LAYER,
    NORMS,
    QK_NORMS,
    ROTARY_BUFFERS,
    read_attention,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)
from transformer.interop.weight_map import Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.models.block import NormPlacement
from transformer.models.config import TransformerConfig


def _read_gemma(fields: Fields, version: int) -> TransformerConfig:
    fields.expect("use_bidirectional_attention", False)
    rms = NormConfig(kind="rms_offset", epsilon=fields.take("rms_norm_eps"))
    settings: dict[str, Any] = {}
    if version > 1:
        settings["score"] = ScaledDotScore(float(fields.take("query_pre_attn_scalar", 0.0)))
        settings["soft_cap"] = fields.take("attn_logit_softcapping", 0.0)
    if version == 3:
        settings["qk_norm"] = rms
        settings["position"] = RoPE()  # replaced below: each kind of layers has its own
    attention = read_attention(fields, bias=fields.take("attention_bias"), **settings)
    mixers: Any = (attention,)
    if version > 1:
        mixers = _read_layers(fields, attention, version)
    names = ACTIVATION_NAMES
    if version == 1:
        names = names | {"gelu": "gelu_tanh"}  # what its first files mean
    activation = fields.choose("hidden_act" if version == 1 else "hidden_activation", names)
    feed_forward = FeedForwardConfig(
        d_ff=fields.size("intermediate_size"), activation=activation, gated=True, bias=False
    )
    config = read_decoder(fields, mixers, feed_forward)
    placement: NormPlacement = "sandwich" if version > 1 else "pre"
    return dataclasses.replace(
        config,
        layer_pattern=tuple(
            dataclasses.replace(block, norm=rms, norm_placement=placement)
            for block in config.layer_pattern
        ),
        final_norm=rms,
        scale_embeddings=True,
        logit_soft_cap=fields.take("final_logit_softcapping", 0.0) if version > 1 else 0.0,
    )


def _read_layers(fields: Fields, attention: AttentionConfig, version: int) -> Any:
    """Return the mixers of all layers: local ones with a window, global ones without."""
    depth = fields.size("num_hidden_layers")
    period = fields.take("sliding_window_pattern") if version == 3 else 2
    default = [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(depth)
    ]
    everywhere = local = attention
    if version == 3:
        scaling = fields.take("rope_scaling", {})
        names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
        ropes = read_ropes(fields, names, {"full_attention": scaling})
        everywhere = dataclasses.replace(attention, position=ropes["full_attention"])
        local = dataclasses.replace(attention, position=ropes["sliding_attention"])
    window = fields.take("sliding_window", 0)
    return read_windows(fields, everywhere, window, default, local)


def _write_gemma(config: TransformerConfig, version: int) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.layer_pattern]
    fields = write_decoder(config) | {"attention_bias": mixers[0].bias}
    act = fields.pop("hidden_act")
    if act.startswith("gelu_new"):
        act = "gelu_pytorch_tanh"
    if version == 1:
        return fields | {"hidden_act": act}
    score = mixers[0].score
    divisor = getattr(score, "divisor", 0) or fields["head_dim"]
    divisor = int(divisor) if divisor == int(divisor) else divisor  # an integer in Gemma2Config
    fields |= {
        "hidden_activation": act,
        "query_pre_attn_scalar": divisor,
        "attn_logit_softcapping": mixers[0].soft_cap or None,
        "final_logit_softcapping": config.logit_soft_cap or None,
    } | write_windows(config)
    if version == 3:
        ropes = {bool(getattr(mixer, "window", 0)): mixer.position for mixer in mixers}
        local, everywhere = ropes.get(True, RoPE()), ropes.get(False, RoPE(theta=1_000_000.0))
        fields |= write_ropes({"full_attention": everywhere, "sliding_attention": local})
        del fields["rope_theta"], fields["rope_scaling"]
    return fields


SANDWICH_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "layers/mixer_output_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "layers/feed_forward_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "layers/feed_forward_output_norm"),
)


def _family(model_type: str, name: str, version: int, *weights: Weight) -> Family:
    return Family(
        model_type,
        (Architecture(f"{name}ForCausalLM", "language_model"),),
        lambda fields: _read_gemma(fields, version),
        lambda config: _write_gemma(config, version),
        (*ENDS, *ATTENTION, *GATED, *weights),
        prefix="model.",
        ignored=ROTARY_BUFFERS,
    )


GEMMA = _family("gemma", "Gemma", 1, *NORMS)
GEMMA2 = _family("gemma2", "Gemma2", 2, *SANDWICH_NORMS)
GEMMA3 = _family("gemma3_text", "Gemma3", 3, *SANDWICH_NORMS, *QK_NORMS)

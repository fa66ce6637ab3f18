"""Gemma 1, 2 and 3 (text models).

Llama's layout with scaled embeddings and gains of 1 + weight. Gemma 2 and 3 have norms after the
sublayers too, and layers with a window between layers without; Gemma 2 caps its scores and logits,
Gemma 3 normalizes queries and keys and gives local layers a base of their own for RoPE.
"""

import dataclasses
from typing import Any

from transformer.attention.attention_config import AttentionConfig, ScaledDotScore
from transformer.attention.position_config import RoPE
from transformer.config import NormPlacement, TransformerConfig
from transformer.interop.family import (
    ACTIVATION_NAMES,
    Architecture,
    Family,
    norm,
    read_rope,
    shortest_period,
    write_rope,
    write_scaling,
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
    with_window,
    write_decoder,
    write_windows,
)
from transformer.interop.weight_map import Weight
from transformer.layers.layer_config import FeedForwardConfig, NormConfig


def _read_gemma(fields: Fields, version: int) -> TransformerConfig:
    fields.expect("use_bidirectional_attention", False)
    rms = NormConfig(kind="rms_offset", epsilon=fields.take("rms_norm_eps", 1e-6))
    bias = fields.take("attention_bias", False)
    settings: dict[str, Any] = {}
    if version > 1:
        divisor = fields.take("query_pre_attn_scalar", 256)
        settings["score"] = ScaledDotScore(float(divisor))
        settings["soft_cap"] = fields.take("attn_logit_softcapping", 0.0)
    if version == 3:
        settings["qk_norm"] = rms
        settings["position"] = RoPE()  # replaced below: each kind of layers has its own
    attention = read_attention(fields, bias=bias, **settings)
    attention = dataclasses.replace(attention, head_dim=fields.take("head_dim", 256))
    mixers: Any = (attention,)
    if version > 1:
        mixers = _read_layers(fields, attention, version)
    # Gemma 1 in its first files has `hidden_act` gelu and means its approximation.
    name = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    activation = fields.choose(name, ACTIVATION_NAMES, "gelu_pytorch_tanh")
    fields.take("hidden_act", "")
    fields.take("hidden_activation", "")
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
        tie_embeddings=fields.take("tie_word_embeddings", True),
        logit_soft_cap=fields.take("final_logit_softcapping", 0.0) if version > 1 else 0.0,
    )


def _read_layers(fields: Fields, attention: AttentionConfig, version: int) -> Any:
    """Return the mixers of all layers: local ones with a window, global ones without."""
    depth, period = fields.size("num_hidden_layers"), 2
    if version == 3:
        period = fields.take("sliding_window_pattern", fields.take("_sliding_window_pattern", 6))
        fields.take("_sliding_window_pattern", 6)
    default = [
        "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
        for layer in range(depth)
    ]
    kinds = fields.take("layer_types", default)
    window = fields.take("sliding_window", 4096)
    everywhere = local = attention
    if version == 3:
        local_theta = fields.take("rope_local_base_freq", 10_000.0)
        parameters = fields.take("rope_parameters", {})
        if "full_attention" in parameters:
            global_rope = read_rope(fields, parameters["full_attention"])
            local_rope = read_rope(fields, parameters["sliding_attention"])
        else:
            global_rope, local_rope = read_rope(fields), RoPE(theta=local_theta)
            if "rope_theta" not in fields and not parameters:
                global_rope = dataclasses.replace(global_rope, theta=1_000_000.0)
        everywhere = dataclasses.replace(attention, position=global_rope)
        local = dataclasses.replace(attention, position=local_rope)
    known = {"full_attention": everywhere, "sliding_attention": with_window(local, window)}
    for kind in kinds:
        if kind not in known:
            raise fields.unsupported("layer_types", "full_attention and sliding_attention")
    return shortest_period([known[kind] for kind in kinds])


def _write_gemma(config: TransformerConfig, version: int) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in config.layer_pattern]
    fields = write_decoder(config) | {"attention_bias": mixers[0].bias}
    act = fields.pop("hidden_act")
    if act.startswith("gelu_new"):
        act = "gelu_pytorch_tanh"
    if version == 1:
        return fields | {"hidden_act": act, "hidden_activation": act}
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
        fields |= write_rope(everywhere)
        fields["rope_local_base_freq"] = getattr(local, "theta", 0.0)
        # Both forms: transformers 5 reads the parameters of each kind of layers.
        fields["rope_parameters"] = {
            name: {"rope_theta": rope.theta, "rope_type": "default"}
            | (write_scaling(rope.scaling) or {})
            for name, rope in (("full_attention", everywhere), ("sliding_attention", local))
            if isinstance(rope, RoPE)
        }
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

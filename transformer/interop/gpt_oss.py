"""gpt-oss (Agarwal et al. 2025): Llama's layout with experts, windows and attention sinks.

Every second layer has a window. The experts have biases and a clamped gate, the router a bias, and
the files hold all experts of a layer in one tensor, gates and ups alternating.
"""

import dataclasses
from typing import Any

from transformer.attention.position_config import RoPE
from transformer.config import TransformerConfig
from transformer.interop.family import (
    FRACTION,
    Architecture,
    Setting,
    linear,
    read_rope,
    with_settings,
    write_scaling,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER_SIZES,
    ENDS,
    EXPERT_COUNTS,
    EXPERT_D_FF,
    LAYER,
    LLAMA,
    NORMS,
    read_windows,
    write_windows,
)
from transformer.interop.weight_map import AllExperts, Weight
from transformer.layers.layer_config import FeedForwardConfig, MoEConfig

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Parameters of GptOssConfig where a config has none."""


def _read_rest(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    kinds = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    rope = {"rope_theta": fields.take("rope_theta"), FRACTION: fields.take(FRACTION, 1.0)}
    rope |= fields.take("rope_scaling", {}) or fields.take("rope_parameters", DEFAULT_ROPE)
    mixer: Any = config.layer_pattern[0].mixer
    attention = dataclasses.replace(mixer, position=read_rope(fields, rope))
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds, window, attention, attention)


def _write_rest(config: TransformerConfig) -> dict[str, Any]:
    rope = getattr(config.layer_pattern[0].mixer, "position", None)
    fields = write_windows(config)
    if not isinstance(rope, RoPE):
        return fields
    scaling = write_scaling(rope.scaling)
    if scaling is None:  # without parameters the default is YaRN
        return fields | {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}}
    fraction = {FRACTION: rope.fraction} if rope.fraction != 1 else {}
    return fields | {"rope_theta": rope.theta, "rope_scaling": scaling} | fraction


MLP, OURS = f"{LAYER}.mlp", "layers/feed_forward"

EXPERTS = MoEConfig(
    router_bias=True,
    expert=FeedForwardConfig(activation="swish", gated=True),
    router_z_loss_weight=0.0,
)

GPT_OSS = dataclasses.replace(
    LLAMA,
    model_type="gpt_oss",
    architectures=(Architecture("GptOssForCausalLM", "language_model"),),
    base=with_settings(
        LLAMA.base, {"layer_pattern.feed_forward": EXPERTS, "layer_pattern.mixer.sinks": True}
    ),
    settings=(
        *DECODER_SIZES,
        ATTENTION_BIAS,
        *EXPERT_COUNTS,
        Setting("intermediate_size", EXPERT_D_FF, is_size=True),
        Setting("swiglu_alpha", "layer_pattern.feed_forward.expert.swish_beta"),
        Setting("swiglu_limit", "layer_pattern.feed_forward.expert.gate_clamp"),
    ),
    weights=(
        *ENDS,
        *NORMS,
        *ATTENTION,
        Weight(f"{LAYER}.self_attn.sinks", "layers/mixer/sinks"),
        *linear(f"{MLP}.router", f"{OURS}/router"),
        Weight(f"{MLP}.experts.gate_up_proj", (f"{OURS}/gate", f"{OURS}/up"), AllExperts()),
        Weight(
            f"{MLP}.experts.gate_up_proj_bias",
            (f"{OURS}/gate_bias", f"{OURS}/up_bias"),
            AllExperts(),
        ),
        Weight(f"{MLP}.experts.down_proj", f"{OURS}/down", AllExperts()),
        Weight(f"{MLP}.experts.down_proj_bias", f"{OURS}/down_bias", AllExperts()),
    ),
    constants={"hidden_act": "silu"},
    read_rest=_read_rest,
    write_rest=_write_rest,
)

"""gpt-oss (Agarwal et al. 2025): Llama's layout with experts, windows and attention sinks.

Every second layer has a window. The experts have biases and a clamped gate, the router a bias, and
the files hold all experts of a layer in one tensor, gates and ups alternating.
"""

from typing import Any

from transformer.attention.rope import RoPE
from transformer.interop.family import Architecture, Family, linear, read_rope
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ENDS,
    LAYER,
    NORMS,
    ROTARY_BUFFERS,
    read_attention,
    read_decoder,
    read_windows,
    write_decoder,
    write_windows,
)
from transformer.interop.weight_map import AllExperts, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.models.config import TransformerConfig

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Parameters of GptOssConfig where a config has none."""


def _read_gpt_oss(fields: Fields) -> TransformerConfig:
    depth = fields.size("num_hidden_layers")
    default = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(depth)]
    scaling = fields.take("rope_scaling", {}) or fields.take("rope_parameters", DEFAULT_ROPE)
    attention = read_attention(
        fields,
        bias=fields.take("attention_bias"),
        sinks=True,
        position=read_rope(fields, section=scaling),
    )
    mixers = read_windows(fields, attention, fields.take("sliding_window", 0), default)
    experts = MoEConfig(
        num_experts=fields.size("num_local_experts"),
        num_experts_per_token=fields.size("num_experts_per_tok"),
        router_bias=True,
        expert=FeedForwardConfig(
            d_ff=fields.size("intermediate_size"),
            activation="swish",
            swish_beta=float(fields.take("swiglu_alpha")),
            gated=True,
            gate_clamp=float(fields.take("swiglu_limit")),
        ),
        load_balance_loss_weight=fields.take("router_aux_loss_coef"),
        router_z_loss_weight=0.0,
    )
    return read_decoder(fields, mixers, experts)


def _write_gpt_oss(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    experts, mixer = block.feed_forward, block.mixer
    fields = write_decoder(config) | write_windows(config)
    if isinstance(mixer.position, RoPE) and fields["rope_scaling"] is None:
        # Without one the default is YaRN.
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": mixer.position.theta}
        del fields["rope_scaling"], fields["rope_theta"]
    return fields | {
        "hidden_act": "silu",
        "attention_bias": mixer.bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "router_aux_loss_coef": experts.load_balance_loss_weight,
        "swiglu_alpha": experts.expert.swish_beta,
        "swiglu_limit": experts.expert.gate_clamp,
    }


MLP, OURS = f"{LAYER}.mlp", "layers/feed_forward"

GPT_OSS = Family(
    "gpt_oss",
    (Architecture("GptOssForCausalLM", "language_model"),),
    _read_gpt_oss,
    _write_gpt_oss,
    (
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
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

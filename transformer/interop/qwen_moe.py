"""Qwen2-MoE and Qwen3-MoE: Qwen's layout with experts in some or all layers.

A layer has experts if its number, counted from 1, is a multiple of `decoder_sparse_step` and not in
`mlp_only_layers`. Qwen2-MoE has a shared expert with a gate beside them.
"""

import dataclasses
from typing import Any

from transformer.interop.family import (
    ACTIVATION_NAMES,
    Setting,
    all_blocks,
    decoder_classes,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER_SIZES,
    ENDS,
    EXPERT_ACTIVATION,
    EXPERT_D_FF,
    GATED,
    GATED_UNIT,
    LLAMA,
    MLP,
    NORMS,
    QK_EPSILON,
    QK_NORMS,
    RMS,
    expert_counts,
    read_windows,
    with_window,
    write_window,
    write_windows,
)
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.models.config import TransformerConfig

MOE = "layer_pattern.feed_forward"

SPARSE = (
    Setting("moe_intermediate_size", EXPERT_D_FF, is_size=True),
    Setting("norm_topk_prob", f"{MOE}.normalize_gates"),
)


NAMES = ("gate", "up", "down")

EXPERTS = (
    Weight(f"{MLP}.gate.weight", "layers/feed_forward/router"),
    *(
        Weight(f"{MLP}.experts.{{index}}.{name}_proj.weight", f"layers/feed_forward/{name}")
        for name in NAMES
    ),
)

SHARED_EXPERT = (
    Weight(f"{MLP}.shared_expert_gate.weight", "layers/feed_forward/shared_expert_gate"),
    *(
        Weight(
            f"{MLP}.shared_expert.{name}_proj.weight", f"layers/feed_forward/shared_expert/{name}"
        )
        for name in NAMES
    ),
)


def with_plain_layers(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    """Return the config with plain feed-forwards in layers that have no experts."""
    plain_layers, period = fields.take("mlp_only_layers", []), fields.take("decoder_sparse_step")
    d_ff, blocks = fields.size("intermediate_size"), all_blocks(config)
    for layer, block in enumerate(blocks):
        if layer in plain_layers or (layer + 1) % period:
            mixture: Any = block.feed_forward
            plain = dataclasses.replace(mixture.expert, d_ff=d_ff)
            blocks[layer] = dataclasses.replace(block, feed_forward=plain)
    return with_blocks(config, blocks)


def write_plain_layers(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of the layers that have no experts."""
    plain = {
        layer: block.feed_forward.d_ff
        for layer, block in enumerate(all_blocks(config))
        if isinstance(block.feed_forward, FeedForwardConfig)
    }
    fields: dict[str, Any] = {"mlp_only_layers": list(plain), "decoder_sparse_step": 1}
    return fields | ({"intermediate_size": max(plain.values())} if plain else {})


def _read_qwen3_moe(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    attention: Any = config.layer_pattern[0].mixer
    window, is_used = fields.take("sliding_window", 0), fields.take("use_sliding_window")
    mixer = with_window(attention, window if is_used else 0)
    config = with_settings(config, {"layer_pattern.mixer": mixer})
    return with_plain_layers(fields, config)


def _write_qwen3_moe(config: TransformerConfig) -> dict[str, Any]:
    window = write_window(config)
    return window | {"use_sliding_window": bool(window)} | write_plain_layers(config)


QWEN3_MOE = dataclasses.replace(
    LLAMA,
    model_type="qwen3_moe",
    architectures=decoder_classes("Qwen3Moe"),
    # `transformers` has no router z-loss.
    base=with_settings(
        LLAMA.base,
        {
            "layer_pattern.mixer.qk_norm": RMS,
            MOE: MoEConfig(expert=GATED_UNIT, router_z_loss_weight=0.0),
        },
    ),
    settings=(
        *DECODER_SIZES,
        Rotary(),
        ATTENTION_BIAS,
        QK_EPSILON,
        *expert_counts("num_local_experts"),
        *SPARSE,
        Setting("hidden_act", EXPERT_ACTIVATION, choices=ACTIVATION_NAMES),
    ),
    weights=(*ENDS, *NORMS, *ATTENTION, *QK_NORMS, *GATED, *EXPERTS),
    read_rest=_read_qwen3_moe,
    write_rest=_write_qwen3_moe,
)


def _read_qwen2_moe(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    window, num_local = fields.take("sliding_window", 0), fields.take("max_window_layers")
    if not fields.take("use_sliding_window"):
        window = 0
    # Of the first `max_window_layers` layers, every second has a window.
    kinds = [
        "sliding_attention" if window and layer < num_local and layer % 2 == 0 else "full_attention"
        for layer in range(config.num_layers)
    ]
    attention: Any = config.layer_pattern[0].mixer
    config = read_windows(fields, config, kinds, window, attention, attention)
    return with_plain_layers(fields, config)


def _write_qwen2_moe(config: TransformerConfig) -> dict[str, Any]:
    windows = write_windows(config)
    windows |= {"use_sliding_window": "sliding_window" in windows}
    return windows | write_plain_layers(config)


SHARED_MOE = MoEConfig(
    expert=GATED_UNIT,
    shared_expert=GATED_UNIT,
    shared_expert_gate=True,
    router_z_loss_weight=0.0,
)

SHARED_D_FF = Setting("shared_expert_intermediate_size", f"{MOE}.shared_expert.d_ff", is_size=True)

QWEN2_MOE = dataclasses.replace(
    LLAMA,
    model_type="qwen2_moe",
    architectures=decoder_classes("Qwen2Moe"),
    base=with_settings(
        LLAMA.base,
        {"layer_pattern.mixer.output_bias": False, MOE: SHARED_MOE},
    ),
    settings=(
        *DECODER_SIZES,
        Rotary(),
        Setting("qkv_bias", "layer_pattern.mixer.bias"),
        *expert_counts("num_experts"),
        *SPARSE,
        SHARED_D_FF,
        Setting(
            "hidden_act",
            (EXPERT_ACTIVATION, f"{MOE}.shared_expert.activation"),
            choices=ACTIVATION_NAMES,
        ),
    ),
    weights=(*ENDS, *NORMS, *ATTENTION, *GATED, *EXPERTS, *SHARED_EXPERT),
    read_rest=_read_qwen2_moe,
    write_rest=_write_qwen2_moe,
)

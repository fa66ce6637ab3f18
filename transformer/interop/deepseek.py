"""DeepSeek-V2 and V3: latent attention, and experts in all layers but the first.

The first `first_k_dense_replace` layers have plain feed-forwards. V2 scores experts by a softmax,
V3 by sigmoids with a bias for the choice; both may choose groups of experts first. The shared
experts are one feed-forward. V3's layers for the prediction of further tokens are left out.
"""

import dataclasses
from typing import Any

from transformer.attention.rope import RoPE
from transformer.attention.variants.latent_attention import LatentAttentionConfig
from transformer.interop.family import (
    ACTIVATION_NAMES,
    COMMON,
    Family,
    Setting,
    all_blocks,
    decoder_classes,
    linear,
    name_of,
    norm,
    sizes,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ENDS,
    EPSILON,
    EXPERT_ACTIVATION,
    EXPERT_D_FF,
    GATED,
    GATED_UNIT,
    LAYER,
    MLP,
    NORMS,
    RMS,
    ROTARY_BUFFERS,
)
from transformer.interop.qwen_moe import EXPERTS, MOE, NAMES
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import HeadsInterleaved, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

MIXER = "layer_pattern.mixer"

SHARED_D_FF = f"{MOE}.shared_expert.d_ff"


def _read(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    """Return the config with its shared experts, and without experts in the first layers."""
    mixer: Any = config.layer_pattern[0].mixer
    # `transformers` makes a key and a value for every head.
    fields.expect("num_key_value_heads", mixer.num_heads)
    fields.take("head_dim")  # `transformers` replaces it by qk_rope_head_dim
    fields.take("qk_head_dim")  # the sum of both parts, which it writes
    mixture: Any = config.layer_pattern[0].feed_forward
    width = fields.size("n_shared_experts") * mixture.expert.d_ff
    config = with_settings(config, {SHARED_D_FF: width})
    blocks, num_plain = all_blocks(config), fields.take("first_k_dense_replace", 0)
    plain = dataclasses.replace(
        mixture.expert,
        d_ff=fields.size("intermediate_size"),
        bias=mixture.shared_expert.bias,
    )
    for layer in range(min(num_plain, config.num_layers)):
        blocks[layer] = dataclasses.replace(blocks[layer], feed_forward=plain)
    return with_blocks(config, blocks)


def _write(config: TransformerConfig) -> dict[str, Any]:
    feed_forwards = [block.feed_forward for block in all_blocks(config)]
    mixtures = [each for each in feed_forwards if isinstance(each, MoEConfig)]
    plain = [each for each in feed_forwards if isinstance(each, FeedForwardConfig)]
    mixer: Any = config.layer_pattern[0].mixer
    fields: dict[str, Any] = {
        "num_key_value_heads": mixer.num_heads,
        "first_k_dense_replace": len(plain),
    }
    if plain:
        fields["intermediate_size"] = plain[0].d_ff
        fields["hidden_act"] = name_of(ACTIVATION_NAMES, plain[0].activation)
    if not mixtures:
        return fields | {"num_experts_per_tok": 2}  # of no layer, and without a default
    shared, width = mixtures[0].shared_expert, mixtures[0].expert.d_ff
    if shared is None or shared.d_ff % width:
        found = "none" if shared is None else f"d_ff {shared.d_ff}"
        raise ValueError(f"shared_expert {found} (it has a multiple of an expert's, {width})")
    return fields | {"n_shared_experts": shared.d_ff // width}


def _read_v2(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    method = fields.take("topk_method", "greedy")
    groups = GROUPS[0].read(fields) | GROUPS[1].read(fields)
    if method == "group_limited_greedy":
        config = with_settings(config, groups)
    elif method != "greedy":
        raise fields.unsupported("topk_method", "greedy and group_limited_greedy")
    return _read(fields, config)


def _write_v2(config: TransformerConfig) -> dict[str, Any]:
    counts = [getattr(block.feed_forward, "num_groups", 1) for block in config.layer_pattern]
    fields = _write(config)
    if isinstance(plain := config.layer_pattern[0].feed_forward, FeedForwardConfig):
        fields["mlp_bias"] = plain.bias
    if max(counts) == 1:
        return fields | {"topk_method": "greedy"}
    for group in GROUPS:
        fields |= group.write(config)
    return fields | {"topk_method": "group_limited_greedy"}


def _read_v3(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    layout = "interleaved" if fields.take("rope_interleave") else "halves"
    return _read(fields, with_settings(config, {f"{MIXER}.position.layout": layout}))


def _write_v3(config: TransformerConfig) -> dict[str, Any]:
    position = getattr(config.layer_pattern[0].mixer, "position", None)
    return _write(config) | {
        "rope_interleave": isinstance(position, RoPE) and position.layout == "interleaved"
    }


QUERY_LATENT = "layers/mixer/query_latent"
"""Path that models with low-rank queries have."""

ATTENTION = (
    Weight(f"{LAYER}.self_attn.q_proj.weight", "layers/mixer/query", without=QUERY_LATENT),
    *linear(f"{LAYER}.self_attn.q_a_proj", QUERY_LATENT),
    *norm(f"{LAYER}.self_attn.q_a_layernorm", f"{QUERY_LATENT}_norm"),
    Weight(f"{LAYER}.self_attn.q_b_proj.weight", "layers/mixer/query", beside=QUERY_LATENT),
    *(
        Weight(
            f"{LAYER}.self_attn.kv_a_proj_with_mqa.{kind}",
            (f"layers/mixer/latent{end}", f"layers/mixer/rope_key{end}"),
        )
        for kind, end in (("weight", ""), ("bias", "_bias"))
    ),
    *norm(f"{LAYER}.self_attn.kv_a_layernorm", "layers/mixer/latent_norm"),
    Weight(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        ("layers/mixer/key", "layers/mixer/value"),
        HeadsInterleaved(),
    ),
    *linear(f"{LAYER}.self_attn.o_proj", "layers/mixer/output"),
)

SHARED_EXPERTS = tuple(
    rule
    for name in NAMES
    for rule in linear(
        f"{MLP}.shared_experts.{name}_proj", f"layers/feed_forward/shared_expert/{name}"
    )
)

GROUPS = (
    Setting("n_group", f"{MOE}.num_groups"),
    Setting("topk_group", f"{MOE}.num_groups_per_token"),
)

SETTINGS = (
    *COMMON,
    *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
    Setting("rms_norm_eps", EPSILON),
    Setting("attention_dropout", f"{MIXER}.dropout"),
    Setting("attention_bias", f"{MIXER}.bias"),
    Setting("q_lora_rank", f"{MIXER}.query_rank", null=0),
    Setting("kv_lora_rank", f"{MIXER}.kv_rank", is_size=True),
    Setting("qk_nope_head_dim", f"{MIXER}.nope_head_dim", is_size=True),
    Setting("qk_rope_head_dim", f"{MIXER}.rope_head_dim", is_size=True),
    Setting("v_head_dim", f"{MIXER}.value_head_dim", is_size=True),
    Setting("n_routed_experts", f"{MOE}.num_experts", is_size=True),
    Setting("num_experts_per_tok", f"{MOE}.num_experts_per_token", is_size=True),
    Setting("moe_intermediate_size", EXPERT_D_FF, is_size=True),
    Setting("routed_scaling_factor", f"{MOE}.routed_scaling_factor"),
    Setting(
        "hidden_act",
        (EXPERT_ACTIVATION, f"{MOE}.shared_expert.activation"),
        choices=ACTIVATION_NAMES,
    ),
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    decoder_classes("DeepseekV2"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=LatentAttentionConfig(),
                feed_forward=MoEConfig(
                    expert=GATED_UNIT,
                    shared_expert=GATED_UNIT,
                    normalize_gates=False,
                    load_balance_loss_weight=0.003,  # of the report, section 3.1.2
                    router_z_loss_weight=0.0,
                ),
                norm=RMS,
            ),
        ),
        final_norm=RMS,
    ),
    settings=(
        *SETTINGS,
        Setting("mlp_bias", f"{MOE}.shared_expert.bias"),
        Rotary(layout="interleaved"),
    ),
    weights=(*ENDS, *NORMS, *ATTENTION, *GATED, *EXPERTS, *SHARED_EXPERTS),
    # `transformers` reads none of these fields, and computes what these values stand for.
    expected={"norm_topk_prob": (False,), "scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    read_rest=_read_v2,
    write_rest=_write_v2,
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architectures=decoder_classes("DeepseekV3"),
    base=with_settings(
        DEEPSEEK_V2.base,
        {
            f"{MOE}.router_score": "sigmoid",
            f"{MOE}.selection_bias": True,
            f"{MOE}.load_balance_loss_weight": 0.0001,  # of the report, section 4.2
        },
    ),
    settings=(
        *SETTINGS,
        *GROUPS,
        Setting("norm_topk_prob", f"{MOE}.normalize_gates"),
        Rotary(),
    ),
    weights=(
        *DEEPSEEK_V2.weights,
        Weight(f"{MLP}.gate.e_score_correction_bias", "layers/feed_forward/selection_bias"),
    ),
    expected={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    constants={"num_nextn_predict_layers": 0},
    read_rest=_read_v3,
    write_rest=_write_v3,
    ignored=(*ROTARY_BUFFERS, "model.layers.61.*"),
)

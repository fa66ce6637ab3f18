"""Qwen3-Next and Mamba-2: layers with a recurrence in place of attention.

Qwen3-Next has Gated DeltaNet in most layers and attention with an output gate in every fourth, and
Qwen's experts with a shared one. Its norms have gains of 1 + weight, but for those of the recurrent
heads. The files keep queries, keys, values and gates of one key head together.

A block of Mamba-2 is a norm, the mixer and the residual, without a feed-forward.
"""

import dataclasses
import math
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.variants.gated_delta import GatedDeltaConfig
from transformer.attention.variants.mamba2 import Mamba2Config
from transformer.interop.family import (
    COMMON,
    Architecture,
    Family,
    Setting,
    all_blocks,
    decoder_classes,
    norm,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER_SIZES,
    ENDS,
    EPSILON,
    GATED,
    LAYER,
    LLAMA,
    NORMS,
    QK_EPSILON,
    QK_NORMS,
    RMS,
    RMS_OFFSET,
    expert_counts,
)
from transformer.interop.qwen_moe import (
    EXPERTS,
    MOE,
    SHARED_D_FF,
    SHARED_EXPERT,
    SHARED_MOE,
    SPARSE,
    with_plain_layers,
    write_plain_layers,
)
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import TABLE, Depthwise, HeadsInterleaved, Weight
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

LINEAR_FIELDS = {
    "linear_num_value_heads": "num_heads",
    "linear_num_key_heads": "num_key_heads",
    "linear_key_head_dim": "head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "kernel_size",
}
"""Fields of Qwen3-Next's recurrence, and those of `GatedDeltaConfig`."""


def _read_qwen3_next(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    period = fields.take("full_attention_interval")
    default = [
        "linear_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config.num_layers)
    ]
    kinds = fields.take("layer_types", default)
    sizes = {ours: fields.size(theirs) for theirs, ours in LINEAR_FIELDS.items()}
    recurrence = GatedDeltaConfig(**sizes, norm_epsilon=fields.take("rms_norm_eps"))
    block = config.layer_pattern[0]
    mixers = {"full_attention": block.mixer, "linear_attention": recurrence}
    if len(kinds) != config.num_layers or not set(kinds) <= mixers.keys():
        known = " and ".join(mixers)
        raise fields.unsupported("layer_types", f"{known}, one for each of {config.num_layers}")
    blocks = [dataclasses.replace(block, mixer=mixers[kind]) for kind in kinds]
    return with_plain_layers(fields, with_blocks(config, blocks))


def _write_qwen3_next(config: TransformerConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in all_blocks(config)]
    fields = write_plain_layers(config) | {
        "layer_types": [
            "linear_attention" if isinstance(mixer, GatedDeltaConfig) else "full_attention"
            for mixer in mixers
        ]
    }
    for mixer in mixers:
        if isinstance(mixer, GatedDeltaConfig):
            fields |= {theirs: getattr(mixer, ours) for theirs, ours in LINEAR_FIELDS.items()}
        elif isinstance(mixer, AttentionConfig):
            # The rules of the settings would find the recurrence's.
            fields |= {"num_attention_heads": mixer.num_heads, "head_dim": mixer.head_dim}
    return fields


# Both kinds of layers have queries, keys, values and gates; only a recurrence has rates.
RATES = "layers/mixer/a_log"

GATED_ATTENTION = (
    *(
        Weight(
            f"{LAYER}.self_attn.q_proj.{theirs}",
            (f"layers/mixer/query{ours}", f"layers/mixer/output_gate{ours}"),
            HeadsInterleaved(),
            without=RATES,
        )
        for theirs, ours in (("weight", ""), ("bias", "_bias"))
    ),
    *(
        dataclasses.replace(rule, without=RATES)
        for rule in ATTENTION
        if ".q_proj." not in rule.theirs
    ),
)

LINEAR = f"{LAYER}.linear_attn"

GATED_DELTA = (
    Weight(
        f"{LINEAR}.in_proj_qkvz.weight",
        tuple(f"layers/mixer/{name}" for name in ("query", "key", "value", "output_gate")),
        HeadsInterleaved(),
        beside=RATES,
    ),
    Weight(
        f"{LINEAR}.in_proj_ba.weight",
        ("layers/mixer/beta", "layers/mixer/decay"),
        HeadsInterleaved(),
    ),
    Weight(
        f"{LINEAR}.conv1d.weight",
        tuple(f"layers/mixer/{name}_taps" for name in ("query", "key", "value")),
        Depthwise(),
    ),
    Weight(f"{LINEAR}.A_log", RATES),
    Weight(f"{LINEAR}.dt_bias", "layers/mixer/dt_bias"),
    Weight(f"{LINEAR}.norm.weight", "layers/mixer/norm/gain"),
    Weight(f"{LINEAR}.out_proj.weight", "layers/mixer/output", beside=RATES),
)

QWEN3_NEXT = dataclasses.replace(
    LLAMA,
    model_type="qwen3_next",
    architectures=decoder_classes("Qwen3Next"),
    base=with_settings(
        LLAMA.base,
        {
            "final_norm": RMS_OFFSET,
            "layer_pattern.norm": RMS_OFFSET,
            "layer_pattern.mixer.qk_norm": RMS_OFFSET,
            "layer_pattern.mixer.output_gate": True,
            MOE: SHARED_MOE,
        },
    ),
    settings=(
        *DECODER_SIZES,
        Rotary(partial=True),
        ATTENTION_BIAS,
        QK_EPSILON,
        *expert_counts("num_experts"),
        *SPARSE,
        SHARED_D_FF,
    ),
    weights=(
        *ENDS,
        *NORMS,
        *GATED_ATTENTION,
        *QK_NORMS,
        *GATED_DELTA,
        *GATED,
        *EXPERTS,
        *SHARED_EXPERT,
    ),
    expected={"hidden_act": ("silu",)},  # of the convolutions too
    constants={"hidden_act": "silu"},
    read_rest=_read_qwen3_next,
    write_rest=_write_qwen3_next,
    ignored=(*LLAMA.ignored, "mtp.*"),  # heads that predict several tokens
)


def _read_mamba2(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    mixer: Any = config.layer_pattern[0].mixer
    if fields.take("expand") * config.d_model != mixer.num_heads * mixer.head_dim:
        raise fields.unsupported("expand", "num_heads head_dim / hidden_size")
    return config


def _write_mamba2(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    return {"expand": mixer.num_heads * mixer.head_dim // config.d_model}


MIXER = "backbone.layers.{layer}.mixer"

PARTS = ("output_gate", "value", "key", "query", "step")
"""Parts of the input projection, in the order of the files: z, x, B, C and dt."""

CONVOLVED = ("value", "key", "query")

UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of a step that limit nothing, as transformers 4 and 5 write them."""

MAMBA2 = Family(
    "mamba2",
    (Architecture("Mamba2ForCausalLM", "language_model"),),
    base=TransformerConfig(
        layer_pattern=(BlockConfig(mixer=Mamba2Config(), feed_forward=None, norm=RMS),),
        final_norm=RMS,
    ),
    settings=(
        *COMMON,
        Setting("hidden_size", "d_model", is_size=True),
        Setting("num_hidden_layers", "num_layers", is_size=True),
        Setting("num_heads", "layer_pattern.mixer.num_heads", is_size=True),
        Setting("head_dim", "layer_pattern.mixer.head_dim", is_size=True),
        Setting("state_size", "layer_pattern.mixer.state_dim", is_size=True),
        Setting("n_groups", "layer_pattern.mixer.num_groups", is_size=True),
        Setting("conv_kernel", "layer_pattern.mixer.kernel_size", is_size=True),
        Setting("use_conv_bias", "layer_pattern.mixer.conv_bias"),
        Setting("use_bias", "layer_pattern.mixer.bias"),
        Setting("layer_norm_epsilon", (*EPSILON, "layer_pattern.mixer.norm_epsilon")),
    ),
    weights=(
        Weight("backbone.embeddings.weight", "embedding", TABLE),
        *norm("backbone.norm_f", "final_norm"),
        Weight("lm_head.weight", "output"),
        *norm("backbone.layers.{layer}.norm", "layers/mixer_norm"),
        Weight(f"{MIXER}.in_proj.weight", tuple(f"layers/mixer/{name}" for name in PARTS)),
        Weight(f"{MIXER}.in_proj.bias", tuple(f"layers/mixer/{name}_bias" for name in PARTS)),
        Weight(
            f"{MIXER}.conv1d.weight",
            tuple(f"layers/mixer/{name}_taps" for name in CONVOLVED),
            Depthwise(),
        ),
        Weight(
            f"{MIXER}.conv1d.bias", tuple(f"layers/mixer/{name}_taps_bias" for name in CONVOLVED)
        ),
        Weight(f"{MIXER}.A_log", "layers/mixer/a_log"),
        Weight(f"{MIXER}.dt_bias", "layers/mixer/dt_bias"),
        Weight(f"{MIXER}.D", "layers/mixer/skip"),
        Weight(f"{MIXER}.norm.weight", "layers/mixer/norm_gain"),
        Weight(f"{MIXER}.out_proj.weight", "layers/mixer/output"),
        Weight(f"{MIXER}.out_proj.bias", "layers/mixer/output_bias"),
    ),
    expected={"hidden_act": ("silu", "swish"), "time_step_limit": UNLIMITED},
    constants={"hidden_act": "silu", "pad_token_id": None},  # the default may be beyond the table
    read_rest=_read_mamba2,
    write_rest=_write_mamba2,
    prefix="backbone.",
)

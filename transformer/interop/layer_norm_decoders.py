"""Decoders in Llama's layout with LayerNorm: StarCoder2, Nemotron and StableLM.

StarCoder2 (Lozhkov et al. 2024) has biases everywhere, a plain feed-forward and a window. Nemotron
(Parmar et al. 2024) has gains of 1 + weight and squared ReLU; StableLM (Bellagente et al. 2024) has
a gated feed-forward, and may have norms of queries and keys with a gain for each head. Both rotate
a part of each head.
"""

from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.interop.family import (
    ACTIVATION,
    D_FF,
    Family,
    QueryKeyNorm,
    Setting,
    decoder_classes,
    linear,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_SIZES,
    ENDS,
    EPSILON,
    FEED_FORWARD,
    GATED,
    GATED_UNIT,
    GELU_TANH_NAMES,
    LAYER,
    MLP_BIAS,
    NORMS,
    ROTARY_BUFFERS,
    read_window,
    write_window,
)
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

STARCODER2 = Family(
    "starcoder2",
    decoder_classes("Starcoder2"),
    base=TransformerConfig(layer_pattern=(BlockConfig(mixer=AttentionConfig(position=RoPE())),)),
    settings=(
        *ATTENTION_SIZES,
        Setting("intermediate_size", D_FF, is_size=True),
        Setting("hidden_act", ACTIVATION, choices=GELU_TANH_NAMES),
        Rotary(),
        Setting("norm_epsilon", EPSILON),
        Setting("use_bias", ("layer_pattern.mixer.bias", "layer_pattern.feed_forward.bias")),
        Setting("residual_dropout", "layer_pattern.residual_dropout"),
        Setting("embedding_dropout", "embedding_dropout"),
    ),
    weights=(
        *ENDS,
        *NORMS,
        *ATTENTION,
        *linear(f"{LAYER}.mlp.c_fc", "layers/feed_forward/up"),
        *linear(f"{LAYER}.mlp.c_proj", "layers/feed_forward/down"),
    ),
    prefix="model.",
    ignored=ROTARY_BUFFERS,
    read_rest=read_window,
    write_rest=write_window,
)


LAYER_OFFSET = NormConfig("layer_offset")

NEMOTRON = Family(
    "nemotron",
    decoder_classes("Nemotron"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(bias=False, position=RoPE()),
                feed_forward=FeedForwardConfig(bias=False),
                norm=LAYER_OFFSET,
            ),
        ),
        final_norm=LAYER_OFFSET,
    ),
    settings=(
        *ATTENTION_SIZES,
        *FEED_FORWARD,
        Rotary(partial=True),
        Setting("norm_eps", EPSILON),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    weights=(*ENDS, *NORMS, *ATTENTION, *GATED),
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)


STABLELM_NORMS = QueryKeyNorm("qk_layernorm", "separate")


def _read_stablelm(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    mixer: Any = config.layer_pattern[0].mixer
    fields.expect("head_dim", config.d_model // mixer.num_heads)
    return STABLELM_NORMS.read(fields, config)


STABLELM = Family(
    "stablelm",
    decoder_classes("StableLm"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(bias=False, output_bias=False, position=RoPE()),
                feed_forward=GATED_UNIT,
            ),
        )
    ),
    settings=(
        *(setting for setting in ATTENTION_SIZES if setting.theirs != "head_dim"),
        *FEED_FORWARD,
        Rotary(partial=True),
        Setting("layer_norm_eps", EPSILON),
        Setting("use_qkv_bias", "layer_pattern.mixer.bias"),
        Setting(
            "use_parallel_residual",
            "layer_pattern.norm_placement",
            choices={False: "pre", True: "parallel_shared"},
        ),
    ),
    weights=(
        *ENDS,
        *NORMS,
        *ATTENTION,
        *GATED,
        *(
            Weight(
                f"{LAYER}.self_attn.{name[0]}_layernorm.norms.{{index}}.weight",
                f"layers/mixer/{name}_norm/gain",
            )
            for name in ("query", "key")
        ),
    ),
    expected={"hidden_dropout": (0,)},  # of the feed-forward alone
    prefix="model.",
    ignored=ROTARY_BUFFERS,
    read_rest=_read_stablelm,
    write_rest=STABLELM_NORMS.write,
)

"""Llama and its relatives: Mistral, Mixtral, Qwen2, Qwen3 and Phi-3.

All have RoPE, RMSNorm before each sublayer and a gated feed-forward without biases. They differ in
a few settings: windows (Mistral), experts (Mixtral), biases of queries, keys and values (Qwen2),
norms of queries and keys (Qwen3), and fused projections in the files (Phi-3).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer.attention.attention_config import AttentionConfig, MixerConfig
from transformer.attention.position_config import RoPE
from transformer.attention.variants.sparse_configs import SlidingWindowConfig
from transformer.config import BlockConfig, TransformerConfig
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    COMMON,
    D_FF,
    Architecture,
    Family,
    Rotary,
    Setting,
    all_blocks,
    linear,
    norm,
    self_attention,
    sizes,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.layer_config import FeedForwardConfig, MoEConfig, NormConfig

RMS = NormConfig(kind="rms")

BLOCK = BlockConfig(
    mixer=AttentionConfig(bias=False, position=RoPE()),
    feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
    norm=RMS,
)

DECODER_SIZES = (
    *COMMON,
    *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
    Setting("num_key_value_heads", "layer_pattern.mixer.num_kv_heads", null=0),
    Setting("head_dim", "layer_pattern.mixer.head_dim", null=0),
    Setting("attention_dropout", "layer_pattern.mixer.dropout"),
    Setting("rms_norm_eps", ("final_norm.epsilon", "layer_pattern.norm.epsilon")),
)
"""Settings of all families of this layout."""

FEED_FORWARD = (
    Setting("intermediate_size", D_FF, is_size=True),
    Setting("hidden_act", ACTIVATION, choices=ACTIVATION_NAMES),
)

EXPERT_D_FF = "layer_pattern.feed_forward.expert.d_ff"
EXPERT_ACTIVATION = "layer_pattern.feed_forward.expert.activation"

EXPERT_COUNTS = (
    Setting("num_local_experts", "layer_pattern.feed_forward.num_experts", is_size=True),
    Setting(
        "num_experts_per_tok", "layer_pattern.feed_forward.num_experts_per_token", is_size=True
    ),
    Setting("router_aux_loss_coef", "layer_pattern.feed_forward.load_balance_loss_weight"),
)

QK_EPSILON = Setting("rms_norm_eps", "layer_pattern.mixer.qk_norm.epsilon")

ATTENTION_BIAS = Setting("attention_bias", "layer_pattern.mixer.bias")

DECODER = (*DECODER_SIZES, *FEED_FORWARD, Rotary())


# Windows.


def with_window(attention: AttentionConfig, window: int) -> MixerConfig:
    """Return the attention restricted to a window; 0: as it is."""
    if not window:
        return attention
    names = {field.name for field in dataclasses.fields(SlidingWindowConfig)}
    shared = {
        field.name: getattr(attention, field.name)
        for field in dataclasses.fields(attention)
        if field.name in names
    }
    return SlidingWindowConfig(window=window, **shared)


def read_window(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    """Return the config with the window of all layers."""
    block: Any = config.layer_pattern[0]
    mixer = with_window(block.mixer, fields.take("sliding_window", 0))
    return with_blocks(config, [dataclasses.replace(block, mixer=mixer)])


def write_window(config: TransformerConfig) -> dict[str, Any]:
    """Return the field of the window of all layers."""
    return {"sliding_window": getattr(config.layer_pattern[0].mixer, "window", None)}


def read_windows(
    fields: Fields,
    config: TransformerConfig,
    default: Sequence[str],
    window: int,
    attention: AttentionConfig,
    local: AttentionConfig,
) -> TransformerConfig:
    """Return the config with the kinds of its layers: `layer_types`, or the default kinds.

    Args:
      fields: Fields of the config.
      config: Config of which all layers are alike.
      default: Kinds of the layers where the file has none.
      window: Window of layers that have one.
      attention: Mixer of layers without a window.
      local: Mixer of the others, but for the window.
    """
    kinds = fields.take("layer_types", list(default))
    if len(kinds) != config.num_layers:
        raise fields.unsupported("layer_types", f"{config.num_layers} kinds, one for each layer")
    mixers = {"full_attention": attention, "sliding_attention": with_window(local, window)}
    if not set(kinds) <= mixers.keys():
        raise fields.unsupported("layer_types", "full_attention and sliding_attention")
    block = config.layer_pattern[0]
    return with_blocks(config, [dataclasses.replace(block, mixer=mixers[kind]) for kind in kinds])


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of layers of which some have a window."""
    windows = [getattr(block.mixer, "window", 0) for block in all_blocks(config)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    fields: dict[str, Any] = {"layer_types": kinds}
    # Not null: the code makes a mask for both kinds of layers, whether there are such or not.
    return fields | ({"sliding_window": max(windows)} if max(windows) else {})


def _read_qwen(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    window, first = fields.take("sliding_window", 0), fields.take("max_window_layers")
    if not fields.take("use_sliding_window"):
        window = 0
    # The first `max_window_layers` layers are those without a window, whatever the name says.
    kinds = [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(config.num_layers)
    ]
    attention: Any = config.layer_pattern[0].mixer
    return read_windows(fields, config, kinds, window, attention, attention)


def _write_qwen(config: TransformerConfig) -> dict[str, Any]:
    windows = write_windows(config)
    return windows | {"use_sliding_window": "sliding_window" in windows}


def _write_phi3(config: TransformerConfig) -> dict[str, Any]:
    scaling = getattr(getattr(config.layer_pattern[0].mixer, "position", None), "scaling", None)
    trained_length = getattr(scaling, "original_max_length", 4096)
    return write_window(config) | {"original_max_position_embeddings": trained_length}


# Weights.

LAYER = "model.layers.{layer}"

ENDS = (
    Weight("model.embed_tokens.weight", "embedding", TABLE),
    *norm("model.norm", "final_norm"),
    Weight("lm_head.weight", "output"),
)

ATTENTION = self_attention(f"{LAYER}.self_attn", "layers/mixer")

QK_NORMS = (
    *norm(f"{LAYER}.self_attn.q_norm", "layers/mixer/query_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", "layers/mixer/key_norm"),
)

NORMS = (
    *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "layers/feed_forward_norm"),
)

GATED = tuple(
    rule
    for name in ("gate", "up", "down")
    for rule in linear(f"{LAYER}.mlp.{name}_proj", f"layers/feed_forward/{name}")
)

EXPERT = f"{LAYER}.block_sparse_moe.experts.{{expert}}"

EXPERTS = (
    Weight(f"{LAYER}.block_sparse_moe.gate.weight", "layers/feed_forward/router"),
    Weight(f"{EXPERT}.w1.weight", "layers/feed_forward/gate"),
    Weight(f"{EXPERT}.w2.weight", "layers/feed_forward/down"),
    Weight(f"{EXPERT}.w3.weight", "layers/feed_forward/up"),
)

# The parts of a fused matrix are side by side along its outputs, in this order.
FUSED = (
    Weight(
        f"{LAYER}.self_attn.qkv_proj.weight",
        ("layers/mixer/query", "layers/mixer/key", "layers/mixer/value"),
    ),
    Weight(f"{LAYER}.self_attn.o_proj.weight", "layers/mixer/output"),
    Weight(
        f"{LAYER}.mlp.gate_up_proj.weight", ("layers/feed_forward/gate", "layers/feed_forward/up")
    ),
    Weight(f"{LAYER}.mlp.down_proj.weight", "layers/feed_forward/down"),
)

ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)


# Families.

LLAMA = Family(
    "llama",
    (Architecture("LlamaForCausalLM", "language_model"),),
    TransformerConfig(layer_pattern=(BLOCK,), final_norm=RMS),
    (*DECODER, ATTENTION_BIAS, Setting("mlp_bias", "layer_pattern.feed_forward.bias")),
    (*ENDS, *NORMS, *ATTENTION, *GATED),
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architectures=(Architecture("MistralForCausalLM", "language_model"),),
    settings=DECODER,
    read_rest=read_window,
    write_rest=write_window,
)

MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architectures=(Architecture("MixtralForCausalLM", "language_model"),),
    # `transformers` has no router z-loss.
    base=with_settings(
        LLAMA.base,
        {
            "layer_pattern.feed_forward": MoEConfig(
                expert=FeedForwardConfig(activation="silu", gated=True, bias=False),
                router_z_loss_weight=0.0,
            )
        },
    ),
    settings=(
        *DECODER_SIZES,
        Rotary(),
        Setting("intermediate_size", EXPERT_D_FF, is_size=True),
        Setting("hidden_act", EXPERT_ACTIVATION, choices=ACTIVATION_NAMES),
        *EXPERT_COUNTS,
    ),
    weights=(*ENDS, *NORMS, *ATTENTION, *EXPERTS),
    expected={"router_jitter_noise": (0,)},
)

QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    architectures=(Architecture("Qwen2ForCausalLM", "language_model"),),
    base=with_settings(
        LLAMA.base, {"layer_pattern.mixer.bias": True, "layer_pattern.mixer.output_bias": False}
    ),
    settings=DECODER,
    read_rest=_read_qwen,
    write_rest=_write_qwen,
)

QWEN3 = dataclasses.replace(
    LLAMA,
    model_type="qwen3",
    architectures=(Architecture("Qwen3ForCausalLM", "language_model"),),
    base=with_settings(LLAMA.base, {"layer_pattern.mixer.qk_norm": RMS}),
    settings=(*DECODER, ATTENTION_BIAS, QK_EPSILON),
    weights=(*ENDS, *NORMS, *ATTENTION, *QK_NORMS, *GATED),
    read_rest=_read_qwen,
    write_rest=_write_qwen,
)

PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architectures=(Architecture("Phi3ForCausalLM", "language_model"),),
    settings=(
        *DECODER_SIZES,
        *FEED_FORWARD,
        Rotary(partial=True),
        Setting("resid_pdrop", "layer_pattern.residual_dropout"),
        Setting("embd_pdrop", "embedding_dropout"),
    ),
    weights=(*ENDS, *NORMS, *FUSED),
    constants={"pad_token_id": None},  # the default, 32000, may be beyond the vocabulary
    write_rest=_write_phi3,
)

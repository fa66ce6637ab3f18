"""Llama and what has its layout: Mistral, Qwen, Phi-3, SmolLM3, Granite, GLM-4, Gemma and gpt-oss.

All have RoPE, RMSNorm before each sublayer and a gated feed-forward without biases. They differ in
a few settings: windows (Mistral), experts (Mixtral), biases of queries, keys and values (Qwen2),
norms of queries and keys (Qwen3), fused projections in the files (Phi-3, GLM-4), layers without
positions (SmolLM3), and factors of embeddings, sublayers, scores and logits (Granite). GLM-4 has
norms after the sublayers too, and rotates neighboring entries of half a head.

Gemma has scaled embeddings and gains of 1 + weight. Gemma 2 and 3 have norms after the sublayers
too, and layers with a window between layers without; Gemma 2 caps its scores and logits, Gemma 3
normalizes queries and keys and gives local layers a base of their own for RoPE.

gpt-oss (Agarwal et al. 2025) has experts, attention sinks, and a window in every second layer. The
experts have biases and a clamped gate, the router a bias, and the files hold all experts of a layer
in one tensor, gates and ups alternating.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
from transformer.attention.rope import RoPE
from transformer.attention.scores import ScaledDotScore
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    COMMON,
    D_FF,
    Architecture,
    Family,
    Setting,
    all_blocks,
    decoder_classes,
    linear,
    norm,
    self_attention,
    sizes,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.rope import (
    FRACTION,
    Rotary,
    read_rope,
    read_ropes,
    write_ropes,
    write_scaling,
)
from transformer.interop.weight_map import TABLE, Weight, WholeStack
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import NO_POSITION
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

RMS = NormConfig(kind="rms")

GATED_UNIT = FeedForwardConfig(activation="silu", gated=True, bias=False)

BLOCK = BlockConfig(
    mixer=AttentionConfig(bias=False, position=RoPE()), feed_forward=GATED_UNIT, norm=RMS
)

EPSILON = ("final_norm.epsilon", "layer_pattern.norm.epsilon")

ATTENTION_SIZES = (
    *COMMON,
    *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
    Setting("num_key_value_heads", "layer_pattern.mixer.num_kv_heads", null=0),
    Setting("head_dim", "layer_pattern.mixer.head_dim", null=0),
    Setting("attention_dropout", "layer_pattern.mixer.dropout"),
)
"""Settings of all families of this layout."""

DECODER_SIZES = (*ATTENTION_SIZES, Setting("rms_norm_eps", EPSILON))

FEED_FORWARD = (
    Setting("intermediate_size", D_FF, is_size=True),
    Setting("hidden_act", ACTIVATION, choices=ACTIVATION_NAMES),
)

GELU_TANH_NAMES = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATION_NAMES}
"""Activations, where the files call the approximation of GELU by the name of PyTorch."""

EXPERT_D_FF = "layer_pattern.feed_forward.expert.d_ff"
EXPERT_ACTIVATION = "layer_pattern.feed_forward.expert.activation"


def expert_counts(num_experts: str) -> tuple[Setting, ...]:
    """Return the rules of the numbers of experts."""
    part = "layer_pattern.feed_forward"
    return (
        Setting(num_experts, f"{part}.num_experts", is_size=True),
        Setting("num_experts_per_tok", f"{part}.num_experts_per_token", is_size=True),
        Setting("router_aux_loss_coef", f"{part}.load_balance_loss_weight"),
    )


EXPERT_COUNTS = expert_counts("num_local_experts")

QK_EPSILON = Setting("rms_norm_eps", "layer_pattern.mixer.qk_norm.epsilon")

ATTENTION_BIAS = Setting("attention_bias", "layer_pattern.mixer.bias")
MLP_BIAS = Setting("mlp_bias", "layer_pattern.feed_forward.bias")

DECODER: tuple[Setting | Rotary, ...] = (*DECODER_SIZES, *FEED_FORWARD, Rotary())


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


def kinds_by_period(config: TransformerConfig, period: int) -> list[str]:
    """Return the kinds of layers of which the last of every `period` has no window."""
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config.num_layers)
    ]


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of layers of which some have a window."""
    windows = [getattr(block.mixer, "window", 0) for block in all_blocks(config)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    fields: dict[str, Any] = {"layer_types": kinds}
    # Not null: the code makes a mask for both kinds of layers, whether there are such or not.
    return fields | ({"sliding_window": max(windows)} if max(windows) else {})


def write_layer_ropes(config: TransformerConfig, everywhere: RoPE, local: RoPE) -> dict[str, Any]:
    """Return the field of the rotary positions of both kinds of layers.

    Args:
      config: The model.
      everywhere: Positions of layers without a window, where it has no such layers.
      local: Positions of layers with a window, where it has no such layers.
    """
    mixers: list[Any] = [block.mixer for block in config.layer_pattern]
    ropes = {bool(getattr(mixer, "window", 0)): mixer.position for mixer in mixers}
    positions = {
        "full_attention": ropes.get(False, everywhere),
        "sliding_attention": ropes.get(True, local),
    }
    return write_ropes(positions)


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


def _read_smollm3(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    period = fields.take("no_rope_layer_interval")
    default = [int((layer + 1) % period != 0) for layer in range(config.num_layers)]
    rotated = fields.take("no_rope_layers", default)[: config.num_layers]
    if len(rotated) < config.num_layers:
        raise fields.unsupported("no_rope_layers", f"a number for each of {config.num_layers}")
    window = fields.take("sliding_window", 0)
    has_window = fields.take("use_sliding_window") and window
    kinds = [
        "sliding_attention" if has_window and not has_position else "full_attention"
        for has_position in rotated
    ]
    attention: Any = config.layer_pattern[0].mixer
    blocks = all_blocks(read_windows(fields, config, kinds, window, attention, attention))
    for layer, has_position in enumerate(rotated):
        if not has_position:
            blocks[layer] = with_settings(blocks[layer], {"mixer.position": NO_POSITION})
    return with_blocks(config, blocks)


def _write_smollm3(config: TransformerConfig) -> dict[str, Any]:
    positions = [getattr(block.mixer, "position", None) for block in all_blocks(config)]
    rotated = [int(isinstance(position, RoPE)) for position in positions]
    windows = write_windows(config)
    return windows | {
        "use_sliding_window": "sliding_window" in windows,
        "no_rope_layers": rotated,
    }


def _read_granite(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    # Rounded, so that the divisor of a factor that was written is the same again.
    divisor = float(f"{fields.take('attention_multiplier') ** -2:.12g}")
    values = {
        "layer_pattern.mixer.score": ScaledDotScore(divisor),
        "logit_scale": 1 / fields.take("logits_scaling"),
    }
    return with_settings(config, values)


def _write_granite(config: TransformerConfig) -> dict[str, Any]:
    divisor = getattr(getattr(config.layer_pattern[0].mixer, "score", None), "divisor", 1.0)
    return {"attention_multiplier": divisor**-0.5, "logits_scaling": 1 / config.logit_scale}


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

EXPERT = f"{LAYER}.block_sparse_moe.experts.{{index}}"

EXPERTS = (
    Weight(f"{LAYER}.block_sparse_moe.gate.weight", "layers/feed_forward/router"),
    Weight(f"{EXPERT}.w1.weight", "layers/feed_forward/gate"),
    Weight(f"{EXPERT}.w2.weight", "layers/feed_forward/down"),
    Weight(f"{EXPERT}.w3.weight", "layers/feed_forward/up"),
)

# The parts of a fused matrix are side by side along its outputs, in this order.
FUSED_GATES = (
    Weight(
        f"{LAYER}.mlp.gate_up_proj.weight", ("layers/feed_forward/gate", "layers/feed_forward/up")
    ),
    Weight(f"{LAYER}.mlp.down_proj.weight", "layers/feed_forward/down"),
)

FUSED = (
    Weight(
        f"{LAYER}.self_attn.qkv_proj.weight",
        ("layers/mixer/query", "layers/mixer/key", "layers/mixer/value"),
    ),
    Weight(f"{LAYER}.self_attn.o_proj.weight", "layers/mixer/output"),
    *FUSED_GATES,
)

ROTARY_BUFFERS = ("*.rotary_emb.inv_freq",)


# Families.

LLAMA = Family(
    "llama",
    decoder_classes("Llama"),
    base=TransformerConfig(layer_pattern=(BLOCK,), final_norm=RMS),
    settings=(*DECODER, ATTENTION_BIAS, MLP_BIAS),
    weights=(*ENDS, *NORMS, *ATTENTION, *GATED),
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architectures=decoder_classes("Mistral"),
    settings=DECODER,
    read_rest=read_window,
    write_rest=write_window,
)

MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architectures=decoder_classes("Mixtral"),
    # `transformers` has no router z-loss.
    base=with_settings(
        LLAMA.base,
        {"layer_pattern.feed_forward": MoEConfig(expert=GATED_UNIT, router_z_loss_weight=0.0)},
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
    architectures=decoder_classes("Qwen2"),
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
    architectures=decoder_classes("Qwen3"),
    base=with_settings(LLAMA.base, {"layer_pattern.mixer.qk_norm": RMS}),
    settings=(*DECODER, ATTENTION_BIAS, QK_EPSILON),
    weights=(*ENDS, *NORMS, *ATTENTION, *QK_NORMS, *GATED),
    read_rest=_read_qwen,
    write_rest=_write_qwen,
)

PHI3 = dataclasses.replace(
    MISTRAL,
    model_type="phi3",
    architectures=decoder_classes("Phi3"),
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

SMOLLM3 = dataclasses.replace(
    LLAMA,
    model_type="smollm3",
    architectures=decoder_classes("SmolLM3"),
    constants={"pad_token_id": None},  # the default, 128004, may be beyond the vocabulary
    read_rest=_read_smollm3,
    write_rest=_write_smollm3,
)

GRANITE = dataclasses.replace(
    LLAMA,
    model_type="granite",
    architectures=(Architecture("GraniteForCausalLM", "language_model"),),
    settings=(
        *LLAMA.settings,
        Setting("embedding_multiplier", "embedding_scale"),
        Setting("residual_multiplier", "layer_pattern.residual_scale"),
    ),
    read_rest=_read_granite,
    write_rest=_write_granite,
)

GLM4 = dataclasses.replace(
    LLAMA,
    model_type="glm4",
    architectures=decoder_classes("Glm4"),
    base=with_settings(
        LLAMA.base,
        {"layer_pattern.norm_placement": "sandwich", "layer_pattern.mixer.output_bias": False},
    ),
    settings=(
        *DECODER_SIZES,
        *FEED_FORWARD,
        ATTENTION_BIAS,
        Rotary(partial=True, layout="interleaved"),
    ),
    weights=(
        *ENDS,
        *ATTENTION,
        *FUSED_GATES,
        *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
        *norm(f"{LAYER}.post_self_attn_layernorm", "layers/mixer_output_norm"),
        *norm(f"{LAYER}.post_attention_layernorm", "layers/feed_forward_norm"),
        *norm(f"{LAYER}.post_mlp_layernorm", "layers/feed_forward_output_norm"),
    ),
    constants={"pad_token_id": None},  # as in Phi-3
)


# Gemma.

RMS_OFFSET = NormConfig(kind="rms_offset")


def _read_gemma2(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    kinds = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    attention = _with_divisor(fields, config)
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds, window, attention, attention)


def _read_gemma3(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    kinds = kinds_by_period(config, fields.take("sliding_window_pattern"))
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
    return _write_gemma2(config) | write_layer_ropes(config, RoPE(theta=1_000_000.0), RoPE())


SANDWICH_NORMS = (
    *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", "layers/mixer_output_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", "layers/feed_forward_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "layers/feed_forward_output_norm"),
)


GEMMA_SETTINGS = (*DECODER_SIZES, Setting("intermediate_size", D_FF, is_size=True), ATTENTION_BIAS)

GEMMA = Family(
    "gemma",
    decoder_classes("Gemma"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(position=RoPE()),
                feed_forward=FeedForwardConfig(gated=True, bias=False),
                norm=RMS_OFFSET,
            ),
        ),
        final_norm=RMS_OFFSET,
        scale_embeddings=True,
    ),
    settings=(
        *GEMMA_SETTINGS,
        Rotary(),
        # `gelu` is what the first files of Gemma call the approximation.
        Setting("hidden_act", ACTIVATION, choices=GELU_TANH_NAMES | {"gelu": "gelu_tanh"}),
    ),
    weights=(*ENDS, *ATTENTION, *GATED, *NORMS),
    expected={"use_bidirectional_attention": (False,)},
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)

GEMMA2 = dataclasses.replace(
    GEMMA,
    model_type="gemma2",
    architectures=decoder_classes("Gemma2"),
    base=with_settings(GEMMA.base, {"layer_pattern.norm_placement": "sandwich"}),
    settings=(
        *GEMMA_SETTINGS,
        Rotary(),
        Setting("hidden_activation", ACTIVATION, choices=GELU_TANH_NAMES),
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
    architectures=decoder_classes("Gemma3", "Gemma3Text"),
    base=with_settings(GEMMA2.base, {"layer_pattern.mixer.qk_norm": RMS_OFFSET}),
    settings=(*(x for x in GEMMA2.settings if not isinstance(x, Rotary)), QK_EPSILON),
    weights=(*ENDS, *ATTENTION, *GATED, *SANDWICH_NORMS, *QK_NORMS),
    read_rest=_read_gemma3,
    write_rest=_write_gemma3,
)


# gpt-oss.

GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Parameters of GptOssConfig where a config has none."""


def _read_gpt_oss(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    kinds = [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_layers)
    ]
    rope = {"rope_theta": fields.take("rope_theta"), FRACTION: fields.take(FRACTION, 1.0)}
    rope |= fields.take("rope_scaling", {}) or fields.take("rope_parameters", GPT_OSS_ROPE)
    mixer: Any = config.layer_pattern[0].mixer
    attention = dataclasses.replace(mixer, position=read_rope(fields, rope))
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds, window, attention, attention)


def _write_gpt_oss(config: TransformerConfig) -> dict[str, Any]:
    rope = getattr(config.layer_pattern[0].mixer, "position", None)
    fields = write_windows(config)
    if not isinstance(rope, RoPE):
        return fields
    scaling = write_scaling(rope.scaling)
    if scaling is None:  # without parameters the default is YaRN
        return fields | {"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}}
    fraction = {FRACTION: rope.fraction} if rope.fraction != 1 else {}
    return fields | {"rope_theta": rope.theta, "rope_scaling": scaling} | fraction


MLP = f"{LAYER}.mlp"

GPT_OSS_EXPERTS = MoEConfig(
    router_bias=True,
    expert=FeedForwardConfig(activation="swish", gated=True),
    router_z_loss_weight=0.0,
)

GPT_OSS = dataclasses.replace(
    LLAMA,
    model_type="gpt_oss",
    architectures=decoder_classes("GptOss"),
    base=with_settings(
        LLAMA.base,
        {"layer_pattern.feed_forward": GPT_OSS_EXPERTS, "layer_pattern.mixer.sinks": True},
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
        *linear(f"{MLP}.router", "layers/feed_forward/router"),
        Weight(
            f"{MLP}.experts.gate_up_proj",
            ("layers/feed_forward/gate", "layers/feed_forward/up"),
            WholeStack(),
        ),
        Weight(
            f"{MLP}.experts.gate_up_proj_bias",
            ("layers/feed_forward/gate_bias", "layers/feed_forward/up_bias"),
            WholeStack(),
        ),
        Weight(f"{MLP}.experts.down_proj", "layers/feed_forward/down", WholeStack()),
        Weight(f"{MLP}.experts.down_proj_bias", "layers/feed_forward/down_bias", WholeStack()),
    ),
    constants={"hidden_act": "silu"},
    read_rest=_read_gpt_oss,
    write_rest=_write_gpt_oss,
)

"""Llama and its relatives: Mistral, Mixtral, Qwen2, Qwen3 and Phi-3.

All have RoPE, RMSNorm before each sublayer and a gated feed-forward without biases. They differ in
a few settings: windows (Mistral), experts (Mixtral), biases of queries, keys and values (Qwen2),
norms of queries and keys (Qwen3), and fused projections in the files (Phi-3).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.interop.family import (
    ACTIVATION_NAMES,
    Architecture,
    Family,
    activation_name,
    linear,
    norm,
    read_rope,
    self_attention,
    shortest_period,
    write_rope,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.feedforward import FeedForwardConfig, resolve_d_ff
from transformer.layers.moe import MoEConfig
from transformer.layers.norms import NormConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig


def read_attention(fields: Fields, *, partial: bool = False, **settings: Any) -> AttentionConfig:
    """Return the attention of a config; `settings` are those that families differ in."""
    num_heads = fields.size("num_attention_heads")
    if "position" not in settings:
        settings["position"] = read_rope(fields, partial=partial)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=fields.take("num_key_value_heads", num_heads),
        head_dim=fields.take("head_dim", 0),
        dropout=fields.take("attention_dropout"),
        **{"bias": False} | settings,
    )


def check_rotary_dim(fields: Fields, attention: Any) -> None:
    """Check that an even number of entries is rotated: `transformers` rounds odd ones up."""
    head_dim = attention.resolved_head_dim(fields.size("hidden_size"))
    if int(head_dim * attention.position.fraction) % 2:
        raise fields.unsupported(
            "rope_parameters", f"a partial_rotary_factor that rotates an even part of {head_dim}"
        )


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


def read_feed_forward(fields: Fields, bias: bool = False) -> FeedForwardConfig:
    """Return the gated feed-forward of a config."""
    return FeedForwardConfig(
        d_ff=fields.size("intermediate_size"),
        activation=fields.choose("hidden_act", ACTIVATION_NAMES),
        gated=True,
        bias=bias,
    )


def read_decoder(
    fields: Fields,
    mixers: tuple[MixerConfig, ...],
    feed_forward: FeedForwardConfig | MoEConfig,
    residual_dropout: float = 0.0,
) -> TransformerConfig:
    """Return the config of a decoder whose layers differ in their mixers alone."""
    rms = NormConfig(kind="rms", epsilon=fields.take("rms_norm_eps"))
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        layer_pattern=tuple(
            BlockConfig(
                mixer=mixer,
                feed_forward=feed_forward,
                norm=rms,
                residual_dropout=residual_dropout,
            )
            for mixer in mixers
        ),
        final_norm=rms,
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def write_decoder(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that all families of this file share."""
    block = config.layer_pattern[0]
    mixer: Any = block.mixer
    feed_forward: Any = block.feed_forward
    expert = feed_forward.expert if isinstance(feed_forward, MoEConfig) else feed_forward
    norm_config = config.final_norm or NormConfig()
    return {
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.resolved_num_kv_heads,
        "head_dim": mixer.resolved_head_dim(config.d_model),
        "intermediate_size": resolve_d_ff(expert, config.d_model),
        "hidden_act": activation_name(expert.activation),
        "rms_norm_eps": norm_config.epsilon,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        **write_rope(mixer.position),
    }


def read_windows(
    fields: Fields,
    attention: AttentionConfig,
    window: int,
    default: Sequence[str],
    local: AttentionConfig | None = None,
) -> tuple[MixerConfig, ...]:
    """Return the mixers of all layers from `layer_types`, or the default kinds.

    Args:
      fields: Fields of the config.
      attention: Mixer of layers without a window.
      window: Window of the others.
      default: Kinds of the layers where the config has none.
      local: Mixer of layers with a window, without it; default: `attention`.
    """
    depth = fields.size("num_hidden_layers")
    kinds = fields.take("layer_types", list(default))
    if len(kinds) != depth:
        raise fields.unsupported("layer_types", f"{depth} kinds, one for each layer")
    known = {
        "full_attention": attention,
        "sliding_attention": with_window(local or attention, window),
    }
    for kind in kinds:
        if kind not in known:
            raise fields.unsupported("layer_types", "full_attention and sliding_attention")
    return shortest_period([known[kind] for kind in kinds])


def write_windows(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of layers of which some have a window."""
    pattern = config.layer_pattern
    mixers = [pattern[layer % len(pattern)].mixer for layer in range(config.num_layers)]
    windows = [getattr(mixer, "window", 0) for mixer in mixers]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    fields: dict[str, Any] = {"layer_types": kinds}
    # Not null: the code makes a mask for both kinds of layers, whether there are such or not.
    return fields | ({"sliding_window": max(windows)} if max(windows) else {})


def _read_llama(fields: Fields) -> TransformerConfig:
    attention = read_attention(fields, bias=fields.take("attention_bias"))
    feed_forward = read_feed_forward(fields, fields.take("mlp_bias"))
    return read_decoder(fields, (attention,), feed_forward)


def _write_llama(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    biases = {"attention_bias": block.mixer.bias, "mlp_bias": block.feed_forward.bias}
    return write_decoder(config) | biases


def _read_mistral(fields: Fields) -> TransformerConfig:
    attention = with_window(read_attention(fields), fields.take("sliding_window", 0))
    return read_decoder(fields, (attention,), read_feed_forward(fields))


def _write_mistral(config: TransformerConfig) -> dict[str, Any]:
    window = getattr(config.layer_pattern[0].mixer, "window", None)
    return write_decoder(config) | {"sliding_window": window}


def _read_mixtral(fields: Fields) -> TransformerConfig:
    attention = with_window(read_attention(fields), fields.take("sliding_window", 0))
    fields.expect("router_jitter_noise", 0)
    # `transformers` has no router z-loss.
    experts = MoEConfig(
        num_experts=fields.size("num_local_experts"),
        num_experts_per_token=fields.size("num_experts_per_tok"),
        expert=read_feed_forward(fields),
        load_balance_loss_weight=fields.take("router_aux_loss_coef"),
        router_z_loss_weight=0.0,
    )
    return read_decoder(fields, (attention,), experts)


def _write_mixtral(config: TransformerConfig) -> dict[str, Any]:
    experts: Any = config.layer_pattern[0].feed_forward
    return _write_mistral(config) | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "router_aux_loss_coef": experts.load_balance_loss_weight,
    }


def _read_qwen2(fields: Fields) -> TransformerConfig:
    attention = read_attention(fields, bias=True, output_bias=False)
    return read_decoder(fields, _qwen_mixers(fields, attention), read_feed_forward(fields))


def _qwen_mixers(fields: Fields, attention: AttentionConfig) -> tuple[MixerConfig, ...]:
    depth = fields.size("num_hidden_layers")
    window, first = fields.take("sliding_window", 0), fields.take("max_window_layers")
    if not fields.take("use_sliding_window"):
        window = 0
    # The first `max_window_layers` layers are those without a window, whatever the name says.
    kinds = [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(depth)
    ]
    return read_windows(fields, attention, window, kinds)


def _write_qwen2(config: TransformerConfig) -> dict[str, Any]:
    windows = write_windows(config)
    use: dict[str, Any] = {"use_sliding_window": "sliding_window" in windows}
    return write_decoder(config) | windows | use


def _read_qwen3(fields: Fields) -> TransformerConfig:
    rms = NormConfig(kind="rms", epsilon=fields.take("rms_norm_eps"))
    attention = read_attention(fields, bias=fields.take("attention_bias"), qk_norm=rms)
    return read_decoder(fields, _qwen_mixers(fields, attention), read_feed_forward(fields))


def _write_qwen3(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    return _write_qwen2(config) | {"attention_bias": mixer.bias}


def _read_phi3(fields: Fields) -> TransformerConfig:
    attention = with_window(read_attention(fields, partial=True), fields.take("sliding_window", 0))
    check_rotary_dim(fields, attention)
    config = read_decoder(
        fields, (attention,), read_feed_forward(fields), fields.take("resid_pdrop")
    )
    return dataclasses.replace(config, embedding_dropout=fields.take("embd_pdrop"))


def _write_phi3(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    scaling = getattr(mixer.position, "scaling", None)
    return _write_mistral(config) | {
        "resid_pdrop": config.layer_pattern[0].residual_dropout,
        "embd_pdrop": config.embedding_dropout,
        "original_max_position_embeddings": getattr(scaling, "original_max_length", 4096),
        "pad_token_id": None,  # the default, 32000, may be beyond the vocabulary
    }


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


def _family(model_type: str, name: str, read: Any, write: Any, *weights: Weight) -> Family:
    return Family(
        model_type,
        (Architecture(f"{name}ForCausalLM", "language_model"),),
        read,
        write,
        (*ENDS, *NORMS, *weights),
        prefix="model.",
        ignored=ROTARY_BUFFERS,
    )


LLAMA = _family("llama", "Llama", _read_llama, _write_llama, *ATTENTION, *GATED)
MISTRAL = _family("mistral", "Mistral", _read_mistral, _write_mistral, *ATTENTION, *GATED)
MIXTRAL = _family("mixtral", "Mixtral", _read_mixtral, _write_mixtral, *ATTENTION, *EXPERTS)
QWEN2 = _family("qwen2", "Qwen2", _read_qwen2, _write_qwen2, *ATTENTION, *GATED)
QWEN3 = _family("qwen3", "Qwen3", _read_qwen3, _write_qwen3, *ATTENTION, *QK_NORMS, *GATED)
PHI3 = _family("phi3", "Phi3", _read_phi3, _write_phi3, *FUSED)

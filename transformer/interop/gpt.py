"""Decoders with LayerNorm: GPT-2, GPT-Neo, GPT-NeoX (Pythia), Bloom, OPT and MPT.

GPT-Neo does not scale its scores, and has a window in every second layer. MPT has no biases.
"""

import dataclasses
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.position_bias import ALiBi
from transformer.attention.rope import RoPE
from transformer.attention.scores import DotScore
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
from transformer.interop.llama import with_window
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import TABLE, HeadsInterleaved, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

QKV_PATHS = ("layers/mixer/query", "layers/mixer/key", "layers/mixer/value")
QKV_BIAS_PATHS = tuple(f"{path}_bias" for path in QKV_PATHS)

EPSILON = ("final_norm.epsilon", "layer_pattern.norm.epsilon")

H = "transformer.h.{layer}"

GPT2 = Family(
    "gpt2",
    (Architecture("GPT2LMHeadModel", "language_model"), decoder_classes("GPT2")[1]),
    base=TransformerConfig(position_embedding=LearnedPositions()),
    settings=(
        *COMMON,
        *sizes("n_embd", "n_layer", "n_head"),
        Setting("n_inner", D_FF, null=0),
        Setting("n_positions", "position_embedding.max_length", is_size=True),
        Setting("activation_function", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("layer_norm_epsilon", EPSILON),
        Setting("attn_pdrop", "layer_pattern.mixer.dropout"),
        Setting("resid_pdrop", "layer_pattern.residual_dropout"),
        Setting("embd_pdrop", "embedding_dropout"),
    ),
    weights=(
        Weight("transformer.wte.weight", "embedding", TABLE),
        Weight("transformer.wpe.weight", "positions", TABLE),
        *norm(f"{H}.ln_1", "layers/mixer_norm"),
        # `Conv1D` stores its matrix [inputs, outputs], as this library does: nothing to transpose.
        Weight(f"{H}.attn.c_attn.weight", QKV_PATHS, TABLE),
        Weight(f"{H}.attn.c_attn.bias", QKV_BIAS_PATHS),
        *linear(f"{H}.attn.c_proj", "layers/mixer/output", TABLE),
        *norm(f"{H}.ln_2", "layers/feed_forward_norm"),
        *linear(f"{H}.mlp.c_fc", "layers/feed_forward/up", TABLE),
        *linear(f"{H}.mlp.c_proj", "layers/feed_forward/down", TABLE),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    prefix="transformer.",
    # Not biases: the causal mask, saved as a buffer.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


def check_head_dim(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    """Return the config; InteropError: `head_dim` is not the width over the number of heads."""
    mixer = config.layer_pattern[0].mixer
    assert isinstance(mixer, AttentionConfig)
    fields.expect("head_dim", config.d_model // mixer.num_heads)
    return config


def _read_gpt_neo(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    types = fields.take("attention_types", [[["global", "local"], 12]])
    kinds = [kind for names, times in types for _ in range(times) for kind in names]
    kinds = fields.take("attention_layers", kinds)  # layer by layer, and it wins
    if len(kinds) != config.num_layers or not set(kinds) <= {"global", "local"}:
        raise fields.unsupported(
            "attention_types", f"{config.num_layers} layers, each global or local"
        )
    block = config.layer_pattern[0]
    attention: Any = block.mixer
    mixers = {"global": attention, "local": with_window(attention, fields.size("window_size"))}
    return with_blocks(config, [dataclasses.replace(block, mixer=mixers[kind]) for kind in kinds])


def _write_gpt_neo(config: TransformerConfig) -> dict[str, Any]:
    windows = [getattr(block.mixer, "window", 0) for block in all_blocks(config)]
    types = [[["local" if window else "global" for window in windows], 1]]
    return {"attention_types": types} | ({"window_size": max(windows)} if max(windows) else {})


GPT_NEO = Family(
    "gpt_neo",
    decoder_classes("GPTNeo"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(mixer=AttentionConfig(bias=False, output_bias=True, score=DotScore())),
        ),
        position_embedding=LearnedPositions(),
    ),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_layers", "num_heads"),
        Setting("intermediate_size", D_FF, null=0),
        Setting("max_position_embeddings", "position_embedding.max_length", is_size=True),
        Setting("activation_function", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("layer_norm_epsilon", EPSILON),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("resid_dropout", "layer_pattern.residual_dropout"),
        Setting("embed_dropout", "embedding_dropout"),
    ),
    weights=(
        Weight("transformer.wte.weight", "embedding", TABLE),
        Weight("transformer.wpe.weight", "positions", TABLE),
        *norm(f"{H}.ln_1", "layers/mixer_norm"),
        *self_attention(
            f"{H}.attn.attention", "layers/mixer", ("q_proj", "k_proj", "v_proj", "out_proj")
        ),
        *norm(f"{H}.ln_2", "layers/feed_forward_norm"),
        *linear(f"{H}.mlp.c_fc", "layers/feed_forward/up"),
        *linear(f"{H}.mlp.c_proj", "layers/feed_forward/down"),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    read_rest=_read_gpt_neo,
    write_rest=_write_gpt_neo,
    prefix="transformer.",
    # Not biases: the causal mask, saved as a buffer.
    ignored=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
)


# By `use_parallel_residual`.
PLACEMENTS = {True: "parallel", False: "pre"}

NEOX = "gpt_neox.layers.{layer}"

GPT_NEOX = Family(
    "gpt_neox",
    decoder_classes("GPTNeoX"),
    base=TransformerConfig(layer_pattern=(BlockConfig(mixer=AttentionConfig(position=RoPE())),)),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
        Setting("intermediate_size", D_FF, is_size=True),
        Setting("hidden_act", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("layer_norm_eps", EPSILON),
        Setting("attention_bias", "layer_pattern.mixer.bias"),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("hidden_dropout", ("layer_pattern.residual_dropout", "embedding_dropout")),
        Setting("use_parallel_residual", "layer_pattern.norm_placement", choices=PLACEMENTS),
        Rotary(partial=True, theta="rotary_emb_base", fraction="rotary_pct"),
    ),
    weights=(
        Weight("gpt_neox.embed_in.weight", "embedding", TABLE),
        *norm(f"{NEOX}.input_layernorm", "layers/mixer_norm"),
        *norm(f"{NEOX}.post_attention_layernorm", "layers/feed_forward_norm"),
        # Rows go by head: q, k and v of the first head, then of the second, ...
        Weight(f"{NEOX}.attention.query_key_value.weight", QKV_PATHS, HeadsInterleaved()),
        Weight(f"{NEOX}.attention.query_key_value.bias", QKV_BIAS_PATHS, HeadsInterleaved()),
        *linear(f"{NEOX}.attention.dense", "layers/mixer/output"),
        *linear(f"{NEOX}.mlp.dense_h_to_4h", "layers/feed_forward/up"),
        *linear(f"{NEOX}.mlp.dense_4h_to_h", "layers/feed_forward/down"),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        Weight("embed_out.weight", "output"),
    ),
    read_rest=check_head_dim,
    prefix="gpt_neox.",
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)

BLOOM = Family(
    "bloom",
    decoder_classes("Bloom"),
    base=TransformerConfig(
        layer_pattern=(BlockConfig(mixer=AttentionConfig(position=ALiBi())),),
        embedding_norm=NormConfig(),
    ),
    settings=(
        *COMMON,
        Setting("hidden_size", "d_model", is_size=True, older="n_embed"),
        Setting("n_layer", "num_layers", is_size=True),
        Setting("n_head", "layer_pattern.mixer.num_heads", is_size=True),
        Setting("layer_norm_epsilon", (*EPSILON, "embedding_norm.epsilon")),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("hidden_dropout", "layer_pattern.residual_dropout"),
    ),
    weights=(
        Weight("transformer.word_embeddings.weight", "embedding", TABLE),
        *norm("transformer.word_embeddings_layernorm", "embedding_norm"),
        *norm(f"{H}.input_layernorm", "layers/mixer_norm"),
        *norm(f"{H}.post_attention_layernorm", "layers/feed_forward_norm"),
        Weight(f"{H}.self_attention.query_key_value.weight", QKV_PATHS, HeadsInterleaved()),
        Weight(f"{H}.self_attention.query_key_value.bias", QKV_BIAS_PATHS, HeadsInterleaved()),
        *linear(f"{H}.self_attention.dense", "layers/mixer/output"),
        *linear(f"{H}.mlp.dense_h_to_4h", "layers/feed_forward/up"),
        *linear(f"{H}.mlp.dense_4h_to_h", "layers/feed_forward/down"),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    prefix="transformer.",
)


def _read_opt(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    fields.expect("word_embed_proj_dim", config.d_model)
    return config


BLOCKS = "transformer.blocks.{layer}"


def _read_mpt(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    attention = fields.inner("attn_config")
    attention.expect("attn_type", "multihead_attention")
    attention.expect("alibi", True)
    attention.expect("alibi_bias_max", 8)  # transformers computes 8, whatever it says
    attention.expect("softmax_scale", None)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.expect(name, False)
    dropout = attention.take("attn_pdrop", 0.0)
    return with_settings(
        config,
        {
            "layer_pattern.mixer.qkv_clip": attention.take("clip_qkv", 0.0),
            "layer_pattern.mixer.dropout": dropout,
            "layer_pattern.residual_dropout": dropout,
        },
    )


def _write_mpt(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    # No dropout: transformers 5 takes only integers for `attn_pdrop`.
    return {"attn_config": {"clip_qkv": mixer.qkv_clip or None}}


NO_BIAS = NormConfig(bias=False)

MPT = Family(
    "mpt",
    decoder_classes("Mpt"),
    base=TransformerConfig(
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(bias=False, position=ALiBi()),
                feed_forward=FeedForwardConfig(activation="gelu", bias=False),
                norm=NO_BIAS,
            ),
        ),
        final_norm=NO_BIAS,
    ),
    settings=(
        *COMMON,
        *sizes("d_model", "n_layers", "n_heads"),
        Setting("layer_norm_epsilon", EPSILON),
    ),
    weights=(
        Weight("transformer.wte.weight", "embedding", TABLE),
        *norm(f"{BLOCKS}.norm_1", "layers/mixer_norm"),
        *norm(f"{BLOCKS}.norm_2", "layers/feed_forward_norm"),
        Weight(f"{BLOCKS}.attn.Wqkv.weight", QKV_PATHS),
        Weight(f"{BLOCKS}.attn.out_proj.weight", "layers/mixer/output"),
        Weight(f"{BLOCKS}.ffn.up_proj.weight", "layers/feed_forward/up"),
        Weight(f"{BLOCKS}.ffn.down_proj.weight", "layers/feed_forward/down"),
        *norm("transformer.norm_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    read_rest=_read_mpt,
    write_rest=_write_mpt,
    prefix="transformer.",
)


DECODER = "model.decoder.layers.{layer}"

OPT = Family(
    "opt",
    decoder_classes("OPT"),
    base=TransformerConfig(position_embedding=LearnedPositions(offset=2)),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
        Setting("ffn_dim", D_FF, is_size=True),
        Setting("activation_function", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("enable_bias", ("layer_pattern.mixer.bias", "layer_pattern.feed_forward.bias")),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("dropout", "layer_pattern.residual_dropout"),
        Setting("max_position_embeddings", "position_embedding.max_length", is_size=True),
    ),
    weights=(
        Weight("model.decoder.embed_tokens.weight", "embedding", TABLE),
        Weight("model.decoder.embed_positions.weight", "positions", TABLE),
        *self_attention(
            f"{DECODER}.self_attn", "layers/mixer", ("q_proj", "k_proj", "v_proj", "out_proj")
        ),
        *norm(f"{DECODER}.self_attn_layer_norm", "layers/mixer_norm"),
        *linear(f"{DECODER}.fc1", "layers/feed_forward/up"),
        *linear(f"{DECODER}.fc2", "layers/feed_forward/down"),
        *norm(f"{DECODER}.final_layer_norm", "layers/feed_forward_norm"),
        *norm("model.decoder.final_layer_norm", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    read_rest=_read_opt,
    write_rest=lambda config: {"word_embed_proj_dim": config.d_model},
    prefix="model.",
)

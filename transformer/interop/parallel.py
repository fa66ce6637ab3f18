"""Decoders whose attention and feed-forward read one norm, side by side.

GPT-J, Phi-1 and Phi-2, Falcon, and Cohere's Command R and Command R7B (`cohere2`). GPT-J and Phi
have a bias of the logits. GPT-J and Cohere rotate neighboring entries. Falcon-40B has two norms.
Cohere has norms without biases, and scales its logits; in `cohere2` layers without a window have no
positions.
"""

import dataclasses
import math
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    COMMON,
    D_FF,
    Architecture,
    Family,
    QueryKeyNorm,
    Setting,
    decoder_classes,
    linear,
    norm,
    self_attention,
    sizes,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.gpt import EPSILON, NO_BIAS, QKV_BIAS_PATHS, QKV_PATHS, H, check_head_dim
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ENDS,
    FEED_FORWARD,
    GATED,
    GATED_UNIT,
    LAYER,
    ROTARY_BUFFERS,
    kinds_by_period,
    read_windows,
    write_windows,
)
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import TABLE, HeadsInterleaved, Weight, WholeStack
from transformer.layers.position_embedding import NO_POSITION
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

BLOCK = BlockConfig(mixer=AttentionConfig(position=RoPE()), norm_placement="parallel_shared")

POSITION = "layer_pattern.mixer.position"


# GPT-J.


def _read_gptj(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    mixer: Any = config.layer_pattern[0].mixer
    head_dim = mixer.resolved_head_dim(config.d_model)
    rotary_dim = fields.size("rotary_dim")
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.unsupported("rotary_dim", f"an even number up to {head_dim}")
    fraction = rotary_dim / head_dim
    if int(head_dim * fraction) < rotary_dim:  # rounded down
        fraction = math.nextafter(fraction, 1)
    return with_settings(config, {POSITION: RoPE(fraction=fraction, layout="interleaved")})


def _write_gptj(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    return {"rotary_dim": mixer.position.rotary_dim(mixer.resolved_head_dim(config.d_model))}


GPTJ = Family(
    "gptj",
    decoder_classes("GPTJ"),
    base=TransformerConfig(
        layer_pattern=(
            dataclasses.replace(BLOCK, mixer=AttentionConfig(bias=False, position=RoPE())),
        ),
        logit_bias=True,
    ),
    settings=(
        *COMMON,
        *sizes("n_embd", "n_layer", "n_head"),
        Setting("n_inner", D_FF, null=0),
        Setting("activation_function", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("layer_norm_epsilon", EPSILON),
        Setting("attn_pdrop", "layer_pattern.mixer.dropout"),
        Setting("resid_pdrop", "layer_pattern.residual_dropout"),
        Setting("embd_pdrop", "embedding_dropout"),
    ),
    weights=(
        Weight("transformer.wte.weight", "embedding", TABLE),
        *norm(f"{H}.ln_1", "layers/mixer_norm"),
        *self_attention(f"{H}.attn", "layers/mixer", ("q_proj", "k_proj", "v_proj", "out_proj")),
        *linear(f"{H}.mlp.fc_in", "layers/feed_forward/up"),
        *linear(f"{H}.mlp.fc_out", "layers/feed_forward/down"),
        *norm("transformer.ln_f", "final_norm"),
        *linear("lm_head", "output"),
    ),
    read_rest=_read_gptj,
    write_rest=_write_gptj,
    prefix="transformer.",
    # Not biases: the causal mask, saved as a buffer.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


# Phi-1 and Phi-2.


PHI_NORMS = QueryKeyNorm("qk_layernorm")


def _read_phi(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    return check_head_dim(fields, PHI_NORMS.read(fields, config))


PHI = Family(
    "phi",
    decoder_classes("Phi"),
    base=TransformerConfig(layer_pattern=(BLOCK,), logit_bias=True),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
        Setting("num_key_value_heads", "layer_pattern.mixer.num_kv_heads", null=0),
        *FEED_FORWARD,
        Setting("layer_norm_eps", EPSILON),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("resid_pdrop", "layer_pattern.residual_dropout"),
        Setting("embd_pdrop", "embedding_dropout"),
        Rotary(partial=True),
    ),
    weights=(
        Weight("model.embed_tokens.weight", "embedding", TABLE),
        *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
        *self_attention(
            f"{LAYER}.self_attn", "layers/mixer", ("q_proj", "k_proj", "v_proj", "dense")
        ),
        *norm(f"{LAYER}.self_attn.q_layernorm", "layers/mixer/query_norm"),
        *norm(f"{LAYER}.self_attn.k_layernorm", "layers/mixer/key_norm"),
        *linear(f"{LAYER}.mlp.fc1", "layers/feed_forward/up"),
        *linear(f"{LAYER}.mlp.fc2", "layers/feed_forward/down"),
        *norm("model.final_layernorm", "final_norm"),
        *linear("lm_head", "output"),
    ),
    read_rest=_read_phi,
    write_rest=PHI_NORMS.write,
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)


# Falcon.


def _read_falcon(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    mixer: Any = config.layer_pattern[0].mixer
    num_norms, num_kv_heads = 1, mixer.num_heads
    if fields.take("new_decoder_architecture"):
        fields.expect("num_ln_in_parallel_attn", 1, 2)
        num_norms = fields.take("num_ln_in_parallel_attn", 2)
        num_kv_heads = fields.take("num_kv_heads", num_kv_heads)
        fields.take("multi_query")
    else:
        fields.expect("num_ln_in_parallel_attn", 1)
        if fields.take("multi_query"):
            num_kv_heads = 1
            fields.take("num_kv_heads")
        else:
            fields.expect("num_kv_heads", num_kv_heads)
    return with_settings(
        config,
        {
            "layer_pattern.norm_placement": "parallel_shared" if num_norms == 1 else "parallel",
            "layer_pattern.mixer.num_kv_heads": num_kv_heads,
        },
    )


def _write_falcon(config: TransformerConfig) -> dict[str, Any]:
    block = config.layer_pattern[0]
    mixer: Any = block.mixer
    num_kv_heads = mixer.resolved_num_kv_heads
    num_norms = 2 if block.norm_placement == "parallel" else 1
    # The layout of Falcon-7B has one norm, and one key-value head or as many as queries.
    if num_norms == 1 and num_kv_heads in (1, mixer.num_heads):
        return {"new_decoder_architecture": False, "multi_query": num_kv_heads == 1}
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": num_kv_heads,
        "num_ln_in_parallel_attn": num_norms,
    }


TWO_NORMS = "layers/feed_forward_norm/gain"
"""Path that models with two norms have."""

FALCON = Family(
    "falcon",
    decoder_classes("Falcon"),
    base=TransformerConfig(layer_pattern=(BLOCK,)),
    settings=(
        *COMMON,
        Setting("hidden_size", "d_model", is_size=True, older="n_embed"),
        Setting("num_hidden_layers", "num_layers", is_size=True),
        Setting("num_attention_heads", "layer_pattern.mixer.num_heads", is_size=True),
        Setting("ffn_hidden_size", D_FF, null=0),
        Setting("activation", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("bias", ("layer_pattern.mixer.bias", "layer_pattern.feed_forward.bias")),
        Setting("layer_norm_epsilon", EPSILON),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("hidden_dropout", "layer_pattern.residual_dropout"),
        Rotary(),
    ),
    weights=(
        Weight("transformer.word_embeddings.weight", "embedding", TABLE),
        *(
            dataclasses.replace(weight, without=TWO_NORMS)
            for weight in norm(f"{H}.input_layernorm", "layers/mixer_norm")
        ),
        *(
            dataclasses.replace(weight, beside=TWO_NORMS)
            for weight in norm(f"{H}.ln_attn", "layers/mixer_norm")
        ),
        *norm(f"{H}.ln_mlp", "layers/feed_forward_norm"),
        Weight(f"{H}.self_attention.query_key_value.weight", QKV_PATHS, HeadsInterleaved()),
        Weight(f"{H}.self_attention.query_key_value.bias", QKV_BIAS_PATHS, HeadsInterleaved()),
        *linear(f"{H}.self_attention.dense", "layers/mixer/output"),
        *linear(f"{H}.mlp.dense_h_to_4h", "layers/feed_forward/up"),
        *linear(f"{H}.mlp.dense_4h_to_h", "layers/feed_forward/down"),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    # `transformers` rounds ALiBi to bfloat16, and the serial layers are those of models with it.
    expected={"alibi": (False,), "parallel_attn": (True,)},
    read_rest=_read_falcon,
    write_rest=_write_falcon,
    prefix="transformer.",
    ignored=("*.rotary_emb.inv_freq",),
)


# Cohere.


COHERE_NORMS = QueryKeyNorm("use_qk_norm", "separate")


COHERE = Family(
    "cohere",
    (Architecture("CohereForCausalLM", "language_model"),),
    base=TransformerConfig(
        layer_pattern=(dataclasses.replace(BLOCK, feed_forward=GATED_UNIT, norm=NO_BIAS),),
        final_norm=NO_BIAS,
    ),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
        Setting("num_key_value_heads", "layer_pattern.mixer.num_kv_heads", null=0),
        Setting("head_dim", "layer_pattern.mixer.head_dim", null=0),
        *FEED_FORWARD,
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        ATTENTION_BIAS,
        Setting("layer_norm_eps", EPSILON),
        Setting("logit_scale", "logit_scale"),
        Rotary(layout="interleaved"),
    ),
    weights=(
        *ENDS,
        *norm(f"{LAYER}.input_layernorm", "layers/mixer_norm"),
        *ATTENTION,
        # One tensor has the gains of all heads.
        Weight(f"{LAYER}.self_attn.q_norm.weight", "layers/mixer/query_norm/gain", WholeStack()),
        Weight(f"{LAYER}.self_attn.k_norm.weight", "layers/mixer/key_norm/gain", WholeStack()),
        *GATED,
    ),
    read_rest=COHERE_NORMS.read,
    write_rest=COHERE_NORMS.write,
    prefix="model.",
    ignored=ROTARY_BUFFERS,
)


def _read_cohere2(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    local: Any = config.layer_pattern[0].mixer
    everywhere = dataclasses.replace(local, position=NO_POSITION)
    kinds = kinds_by_period(config, fields.take("sliding_window_pattern"))
    return read_windows(fields, config, kinds, fields.size("sliding_window"), everywhere, local)


COHERE2 = dataclasses.replace(
    COHERE,
    model_type="cohere2",
    architectures=(Architecture("Cohere2ForCausalLM", "language_model"),),
    read_rest=_read_cohere2,
    write_rest=write_windows,
)

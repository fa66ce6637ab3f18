"""Decoders with LayerNorm and biases: GPT-2, GPT-NeoX (Pythia), Bloom and OPT."""

from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.position_bias import ALiBi
from transformer.interop.family import (
    ACTIVATION_NAMES,
    FRACTION,
    Architecture,
    Family,
    activation_name,
    linear,
    norm,
    read_rope,
    self_attention,
    write_rope,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import check_rotary_dim
from transformer.interop.weight_map import TABLE, HeadsInterleaved, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig

QKV = ("layers/mixer/query", "layers/mixer/key", "layers/mixer/value")
QKV_BIASES = tuple(f"{path}_bias" for path in QKV)


def _read_gpt2(fields: Fields) -> TransformerConfig:
    layer_norm = NormConfig(epsilon=fields.take("layer_norm_epsilon"))
    d_model = fields.size("n_embd")
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        num_layers=fields.size("n_layer"),
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(
                    num_heads=fields.size("n_head"), dropout=fields.take("attn_pdrop")
                ),
                feed_forward=FeedForwardConfig(
                    d_ff=fields.take("n_inner", 4 * d_model),
                    activation=fields.choose("activation_function", ACTIVATION_NAMES),
                ),
                norm=layer_norm,
                residual_dropout=fields.take("resid_pdrop"),
            ),
        ),
        position_embedding=LearnedPositions(fields.size("n_positions")),
        embedding_dropout=fields.take("embd_pdrop"),
        final_norm=layer_norm,
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def _write_gpt2(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": block.mixer.num_heads,
        "n_inner": block.feed_forward.d_ff or 4 * config.d_model,
        "n_positions": config.max_length or 0,
        "activation_function": activation_name(block.feed_forward.activation),
        "layer_norm_epsilon": (config.final_norm or NormConfig()).epsilon,
        "attn_pdrop": block.mixer.dropout,
        "resid_pdrop": block.residual_dropout,
        "embd_pdrop": config.embedding_dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }


H = "transformer.h.{layer}"

GPT2 = Family(
    "gpt2",
    (Architecture("GPT2LMHeadModel", "language_model"),),
    _read_gpt2,
    _write_gpt2,
    (
        Weight("transformer.wte.weight", "embedding", TABLE),
        Weight("transformer.wpe.weight", "positions", TABLE),
        *norm(f"{H}.ln_1", "layers/mixer_norm"),
        # `Conv1D` stores its matrix [inputs, outputs], as this library does: nothing to transpose.
        Weight(f"{H}.attn.c_attn.weight", QKV, TABLE),
        Weight(f"{H}.attn.c_attn.bias", QKV_BIASES),
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


def _read_neox(fields: Fields) -> TransformerConfig:
    layer_norm = NormConfig(epsilon=fields.take("layer_norm_eps"))
    theta, fraction = fields.take("rotary_emb_base"), fields.take("rotary_pct")  # transformers 4
    rope = read_rope(fields, {"rope_theta": theta, FRACTION: fraction}, partial=True)
    dropout = fields.take("hidden_dropout")
    d_model, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    fields.expect("head_dim", d_model // num_heads)
    attention = AttentionConfig(
        num_heads=num_heads,
        bias=fields.take("attention_bias"),
        position=rope,
        dropout=fields.take("attention_dropout"),
    )
    check_rotary_dim(fields, attention)
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        num_layers=fields.size("num_hidden_layers"),
        layer_pattern=(
            BlockConfig(
                mixer=attention,
                feed_forward=FeedForwardConfig(
                    d_ff=fields.size("intermediate_size"),
                    activation=fields.choose("hidden_act", ACTIVATION_NAMES),
                ),
                norm=layer_norm,
                norm_placement="parallel" if fields.take("use_parallel_residual") else "pre",
                residual_dropout=dropout,
            ),
        ),
        embedding_dropout=dropout,
        final_norm=layer_norm,
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def _write_neox(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    rope = block.mixer.position
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": block.mixer.num_heads,
        "intermediate_size": block.feed_forward.d_ff or 4 * config.d_model,
        "hidden_act": activation_name(block.feed_forward.activation),
        "layer_norm_eps": (config.final_norm or NormConfig()).epsilon,
        "attention_bias": block.mixer.bias,
        "attention_dropout": block.mixer.dropout,
        "hidden_dropout": block.residual_dropout,
        "use_parallel_residual": block.norm_placement == "parallel",
        "rotary_emb_base": getattr(rope, "theta", 0.0),
        "rotary_pct": getattr(rope, "fraction", 0.0),
        "rope_scaling": write_rope(rope).get("rope_scaling"),
        "tie_word_embeddings": config.tie_embeddings,
    }


NEOX = "gpt_neox.layers.{layer}"

GPT_NEOX = Family(
    "gpt_neox",
    (Architecture("GPTNeoXForCausalLM", "language_model"),),
    _read_neox,
    _write_neox,
    (
        Weight("gpt_neox.embed_in.weight", "embedding", TABLE),
        *norm(f"{NEOX}.input_layernorm", "layers/mixer_norm"),
        *norm(f"{NEOX}.post_attention_layernorm", "layers/feed_forward_norm"),
        # Rows go by head: q, k and v of the first head, then of the second, ...
        Weight(f"{NEOX}.attention.query_key_value.weight", QKV, HeadsInterleaved()),
        Weight(f"{NEOX}.attention.query_key_value.bias", QKV_BIASES, HeadsInterleaved()),
        *linear(f"{NEOX}.attention.dense", "layers/mixer/output"),
        *linear(f"{NEOX}.mlp.dense_h_to_4h", "layers/feed_forward/up"),
        *linear(f"{NEOX}.mlp.dense_4h_to_h", "layers/feed_forward/down"),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        Weight("embed_out.weight", "output"),
    ),
    prefix="gpt_neox.",
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)


def _read_bloom(fields: Fields) -> TransformerConfig:
    layer_norm = NormConfig(epsilon=fields.take("layer_norm_epsilon"))
    d_model = fields.take("n_embed", 0) or fields.size("hidden_size")
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        num_layers=fields.size("n_layer"),
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(
                    num_heads=fields.size("n_head"),
                    position=ALiBi(),
                    dropout=fields.take("attention_dropout"),
                ),
                feed_forward=FeedForwardConfig(d_ff=4 * d_model, activation="gelu_tanh"),
                norm=layer_norm,
                residual_dropout=fields.take("hidden_dropout"),
            ),
        ),
        embedding_norm=layer_norm,
        final_norm=layer_norm,
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def _write_bloom(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "n_layer": config.num_layers,
        "n_head": block.mixer.num_heads,
        "layer_norm_epsilon": (config.final_norm or NormConfig()).epsilon,
        "attention_dropout": block.mixer.dropout,
        "hidden_dropout": block.residual_dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }


BLOOM = Family(
    "bloom",
    (Architecture("BloomForCausalLM", "language_model"),),
    _read_bloom,
    _write_bloom,
    (
        Weight("transformer.word_embeddings.weight", "embedding", TABLE),
        *norm("transformer.word_embeddings_layernorm", "embedding_norm"),
        *norm(f"{H}.input_layernorm", "layers/mixer_norm"),
        *norm(f"{H}.post_attention_layernorm", "layers/feed_forward_norm"),
        Weight(f"{H}.self_attention.query_key_value.weight", QKV, HeadsInterleaved()),
        Weight(f"{H}.self_attention.query_key_value.bias", QKV_BIASES, HeadsInterleaved()),
        *linear(f"{H}.self_attention.dense", "layers/mixer/output"),
        *linear(f"{H}.mlp.dense_h_to_4h", "layers/feed_forward/up"),
        *linear(f"{H}.mlp.dense_4h_to_h", "layers/feed_forward/down"),
        *norm("transformer.ln_f", "final_norm"),
        Weight("lm_head.weight", "output"),
    ),
    prefix="transformer.",
)


def _read_opt(fields: Fields) -> TransformerConfig:
    d_model = fields.size("hidden_size")
    fields.expect("word_embed_proj_dim", d_model)
    bias = fields.take("enable_bias")
    layer_norm = NormConfig()
    dropout = fields.take("dropout")
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        num_layers=fields.size("num_hidden_layers"),
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(
                    num_heads=fields.size("num_attention_heads"),
                    bias=bias,
                    dropout=fields.take("attention_dropout"),
                ),
                feed_forward=FeedForwardConfig(
                    d_ff=fields.size("ffn_dim"),
                    activation=fields.choose("activation_function", ACTIVATION_NAMES),
                    bias=bias,
                ),
                norm=layer_norm,
                residual_dropout=dropout,
            ),
        ),
        position_embedding=LearnedPositions(fields.size("max_position_embeddings"), offset=2),
        final_norm=layer_norm,
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def _write_opt(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "word_embed_proj_dim": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": block.mixer.num_heads,
        "ffn_dim": block.feed_forward.d_ff or 4 * config.d_model,
        "activation_function": activation_name(block.feed_forward.activation),
        "enable_bias": block.mixer.bias,
        "attention_dropout": block.mixer.dropout,
        "dropout": block.residual_dropout,
        "max_position_embeddings": config.max_length or 0,
        "tie_word_embeddings": config.tie_embeddings,
    }


DECODER = "model.decoder.layers.{layer}"

OPT = Family(
    "opt",
    (Architecture("OPTForCausalLM", "language_model"),),
    _read_opt,
    _write_opt,
    (
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
    prefix="model.",
)

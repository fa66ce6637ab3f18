"""Encoder-decoders: T5 (with the gated v1.1), BART, and Marian.

Marian (Junczys-Dowmunt et al. 2018), as the translation models of OPUS-MT have it, is BART's layout
with sinusoidal positions (all sines, then all cosines), no norm of the embeddings, a bias of the
logits, and tables that source and target share or not.
"""

import dataclasses
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.position_bias import T5RelativeBias
from transformer.attention.scores import DotScore
from transformer.interop.family import (
    ACTIVATION_NAMES,
    Architecture,
    Family,
    activation_name,
    linear,
    norm,
    self_attention,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, AsIs, Weight
from transformer.layers.feedforward import FeedForwardConfig, resolve_d_ff
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import (
    LearnedPositions,
    NoPosition,
    PositionEmbedding,
    SinusoidalPositions,
)
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig


def tables(shared: str, encoder: str, decoder: str) -> tuple[Weight, ...]:
    """Return the rules of the embeddings: one table, or one of the source and one of the target."""
    return (
        Weight(shared, "embedding", TABLE, without="source_embedding"),
        Weight(encoder, "source_embedding", TABLE),
        Weight(decoder, "embedding", TABLE, beside="source_embedding"),
    )


def _read_t5(fields: Fields) -> TransformerConfig:
    fields.expect("is_causal", None)  # of the encoder as well as the decoder
    rms = NormConfig(kind="rms", epsilon=fields.take("layer_norm_epsilon"))
    dropout = fields.take("dropout_rate")
    projection = fields.take("feed_forward_proj")
    gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    name = "gelu_new" if projection == "gated-gelu" else name  # as T5Config does
    if name not in ACTIVATION_NAMES:
        raise fields.unsupported("feed_forward_proj", "relu, gated-gelu and gated-silu")
    fields.expect("dense_act_fn", name)  # both repeat what `feed_forward_proj` says
    fields.expect("is_gated_act", gated)
    tied = fields.take("tie_word_embeddings", True)
    position = T5RelativeBias(
        num_buckets=fields.take("relative_attention_num_buckets"),
        max_distance=fields.take("relative_attention_max_distance"),
        shared=True,
    )
    both_ways = dataclasses.replace(position, bidirectional=True)
    self_attention_config = AttentionConfig(
        num_heads=fields.size("num_heads"),
        head_dim=fields.size("d_kv"),
        bias=False,
        score=DotScore(),
        position=position,
        dropout=dropout,
    )
    block = BlockConfig(
        mixer=self_attention_config,
        cross_attention=dataclasses.replace(self_attention_config, position=NoPosition()),
        feed_forward=FeedForwardConfig(
            d_ff=fields.size("d_ff"),
            activation=ACTIVATION_NAMES[name],
            gated=gated,
            bias=False,
            dropout=dropout,
        ),
        norm=rms,
        residual_dropout=dropout,
    )
    encoder_block = dataclasses.replace(
        block,
        mixer=dataclasses.replace(self_attention_config, position=both_ways),
        cross_attention=None,
    )
    depth, width = fields.size("num_layers"), fields.size("d_model")
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=width,
        num_layers=fields.take("num_decoder_layers", depth),
        layer_pattern=(block,),
        encoder=EncoderConfig(num_layers=depth, layer_pattern=(encoder_block,), final_norm=rms),
        final_norm=rms,
        tie_embeddings=tied,
        logit_scale=width**-0.5 if fields.take("scale_decoder_outputs", tied) else 1.0,
        embedding_dropout=dropout,
    )


def _write_t5(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    encoder = config.encoder or EncoderConfig()
    position = block.mixer.position
    activation = activation_name(block.feed_forward.activation)
    if block.feed_forward.gated:
        activation = "gated-gelu" if activation == "gelu_new" else f"gated-{activation}"
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": block.mixer.resolved_head_dim(config.d_model),
        "d_ff": resolve_d_ff(block.feed_forward, config.d_model),
        "num_layers": encoder.num_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": block.mixer.num_heads,
        "relative_attention_num_buckets": getattr(position, "num_buckets", 0),
        "relative_attention_max_distance": getattr(position, "max_distance", 0),
        "feed_forward_proj": activation,
        "layer_norm_epsilon": (config.final_norm or NormConfig()).epsilon,
        "dropout_rate": block.residual_dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.logit_scale != 1,
    }


def _t5_stack(side: str, feed_forward: int) -> tuple[Weight, ...]:
    block, ours = f"{side}.block.{{layer}}.layer", f"{side}/layers"
    dense, names = f"{block}.{feed_forward}.DenseReluDense", ("q", "k", "v", "o")
    up, gate = f"{ours}/feed_forward/up", f"{ours}/feed_forward/gate"
    return (
        *self_attention(f"{block}.0.SelfAttention", f"{ours}/mixer", names),
        *norm(f"{block}.0.layer_norm", f"{ours}/mixer_norm"),
        # One table, which all layers share.
        Weight(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{side}/position_bias",
            AsIs(),
        ),
        Weight(f"{dense}.wi.weight", up, without=gate),
        Weight(f"{dense}.wi_0.weight", gate),
        Weight(f"{dense}.wi_1.weight", up, beside=gate),
        Weight(f"{dense}.wo.weight", f"{ours}/feed_forward/down"),
        *norm(f"{block}.{feed_forward}.layer_norm", f"{ours}/feed_forward_norm"),
        *norm(f"{side}.final_layer_norm", f"{side}/final_norm"),
    )


DECODER_BLOCK = "decoder.block.{layer}.layer.1"

T5 = Family(
    "t5",
    (Architecture("T5ForConditionalGeneration", "encoder_decoder"),),
    _read_t5,
    _write_t5,
    (
        *tables("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        *_t5_stack("encoder", 1),
        *_t5_stack("decoder", 2),
        *self_attention(
            f"{DECODER_BLOCK}.EncDecAttention", "decoder/layers/cross", ("q", "k", "v", "o")
        ),
        *norm(f"{DECODER_BLOCK}.layer_norm", "decoder/layers/cross_norm"),
        Weight("lm_head.weight", "output"),
    ),
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)


def _read_bart(fields: Fields) -> TransformerConfig:
    for name in ("normalize_before", "add_final_layer_norm", "normalize_embedding"):
        fields.expect(name, name == "normalize_embedding")  # of transformers 3
    fields.expect("static_position_embeddings", False)
    fields.expect("extra_pos_embeddings", 2)
    return read_bart(fields, LearnedPositions(fields.size("max_position_embeddings"), offset=2))


def read_bart(fields: Fields, positions: PositionEmbedding) -> TransformerConfig:
    """Return the config of BART or a relative with its fields."""
    fields.expect("add_bias_logits", False)
    fields.expect("is_causal", None)  # of the encoder as well as the decoder
    layer_norm, dropout = NormConfig(), fields.take("dropout")
    hidden_dropout = fields.take("activation_dropout")
    activation = fields.choose("activation_function", ACTIVATION_NAMES)

    def block(side: str) -> BlockConfig:
        return BlockConfig(
            mixer=AttentionConfig(
                num_heads=fields.size(f"{side}_attention_heads"),
                dropout=fields.take("attention_dropout"),
            ),
            feed_forward=FeedForwardConfig(
                d_ff=fields.size(f"{side}_ffn_dim"), activation=activation, dropout=hidden_dropout
            ),
            norm=layer_norm,
            norm_placement="post",
            residual_dropout=dropout,
        )

    decoder, tied = block("decoder"), fields.take("tie_word_embeddings")
    vocab_size = fields.size("vocab_size")
    return TransformerConfig(
        vocab_size=vocab_size,
        d_model=fields.size("d_model"),
        num_layers=fields.size("decoder_layers"),
        layer_pattern=(dataclasses.replace(decoder, cross_attention=decoder.mixer),),
        encoder=EncoderConfig(
            num_layers=fields.size("encoder_layers"),
            layer_pattern=(block("encoder"),),
            final_norm=None,
            # Without ties there are three tables: source, target and output.
            vocab_size=0 if tied else vocab_size,
        ),
        position_embedding=positions,
        embedding_norm=layer_norm,
        embedding_dropout=dropout,
        scale_embeddings=fields.take("scale_embedding"),
        final_norm=None,
        tie_embeddings=tied,
    )


def write_bart(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields of BART."""
    encoder = config.encoder or EncoderConfig()
    fields: dict[str, Any] = {}
    for side, stack in (("encoder", encoder), ("decoder", config)):
        block: Any = stack.layer_pattern[0]
        fields |= {
            f"{side}_layers": stack.num_layers,
            f"{side}_attention_heads": block.mixer.num_heads,
            f"{side}_ffn_dim": block.feed_forward.d_ff or 4 * config.d_model,
        }
    block = config.layer_pattern[0]
    return fields | {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "activation_function": activation_name(block.feed_forward.activation),
        "max_position_embeddings": config.max_length or 0,
        "scale_embedding": config.scale_embeddings,
        "dropout": block.residual_dropout,
        "activation_dropout": block.feed_forward.dropout,
        "attention_dropout": block.mixer.dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tie_embeddings,
    }


def bart_stack(side: str) -> tuple[Weight, ...]:
    """Return the rules of one side of BART."""
    layer, ours = f"model.{side}.layers.{{layer}}", f"{side}/layers"
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    cross: tuple[Weight, ...] = ()
    if side == "decoder":
        cross = (
            *self_attention(f"{layer}.encoder_attn", f"{ours}/cross", names),
            *norm(f"{layer}.encoder_attn_layer_norm", f"{ours}/cross_norm"),
        )
    return (
        Weight(f"model.{side}.embed_positions.weight", f"{side}/positions", TABLE),
        *norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm"),
        *self_attention(f"{layer}.self_attn", f"{ours}/mixer", names),
        *norm(f"{layer}.self_attn_layer_norm", f"{ours}/mixer_norm"),
        *cross,
        *linear(f"{layer}.fc1", f"{ours}/feed_forward/up"),
        *linear(f"{layer}.fc2", f"{ours}/feed_forward/down"),
        *norm(f"{layer}.final_layer_norm", f"{ours}/feed_forward_norm"),
    )


ENCODER_TABLE = "model.encoder.embed_tokens.weight"
DECODER_TABLE = "model.decoder.embed_tokens.weight"

BART_TABLES = (
    *tables("model.shared.weight", ENCODER_TABLE, DECODER_TABLE),
    # One table of source and target beside an own output matrix: as two equal ones.
    *(
        Weight(name, "embedding", TABLE, without="source_embedding", beside="output")
        for name in (ENCODER_TABLE, DECODER_TABLE)
    ),
)

BART = Family(
    "bart",
    (Architecture("BartForConditionalGeneration", "encoder_decoder"),),
    _read_bart,
    write_bart,
    (
        *BART_TABLES,
        *bart_stack("encoder"),
        *bart_stack("decoder"),
        Weight("lm_head.weight", "output"),
    ),
    prefix="model.",
    zeros=("final_logits_bias",),
)


def _read_marian(fields: Fields) -> TransformerConfig:
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        fields.expect(name, False)
    fields.expect("static_position_embeddings", True)
    vocab_size = fields.size("vocab_size")
    target_size = fields.take("decoder_vocab_size", vocab_size)
    shared = fields.take("share_encoder_decoder_embeddings")
    config = read_bart(fields, SinusoidalPositions("halves"))
    assert config.encoder is not None
    if shared and not config.tie_embeddings:
        fields.expect("decoder_vocab_size", vocab_size)  # of the target alone, unlike the logits
    # Source and target may have tables of their own, of one size or of two.
    size = config.encoder.vocab_size if shared else vocab_size
    encoder = dataclasses.replace(config.encoder, vocab_size=size)
    return dataclasses.replace(
        config,
        vocab_size=vocab_size if shared else target_size,
        encoder=encoder,
        embedding_norm=None,
        logit_bias=True,
    )


def _write_marian(config: TransformerConfig) -> dict[str, Any]:
    source_size = 0 if config.encoder is None else config.encoder.vocab_size
    fields = write_bart(config)
    del fields["max_position_embeddings"]  # of a table that is computed
    return fields | {
        "vocab_size": source_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": not source_size,
        "pad_token_id": None,  # the default, 58100, may be beyond the vocabulary
    }


MARIAN = Family(
    "marian",
    (Architecture("MarianMTModel", "encoder_decoder"),),
    _read_marian,
    _write_marian,
    (
        *BART_TABLES,
        *bart_stack("encoder"),
        *bart_stack("decoder"),
        Weight("lm_head.weight", "output"),
        Weight("final_logits_bias", "output_bias", AsIs(leading=1)),
    ),
    prefix="model.",
    # Sinusoids.
    ignored=(
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    ),
)

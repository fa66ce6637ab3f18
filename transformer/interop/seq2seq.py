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
    COMMON,
    Architecture,
    Family,
    Setting,
    linear,
    name_of,
    norm,
    self_attention,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, AsIs, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions, SinusoidalPositions
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig


def _on_both_sides(path: str) -> tuple[str, str]:
    """Return the paths of a setting of the layers of decoder and encoder."""
    return f"layer_pattern.{path}", f"encoder.layer_pattern.{path}"


def _of_attention(name: str) -> tuple[str, ...]:
    """Return the paths of a setting of all attention layers."""
    return (*_on_both_sides(f"mixer.{name}"), f"layer_pattern.cross_attention.{name}")


def tables(shared: str, encoder: str, decoder: str) -> tuple[Weight, ...]:
    """Return the rules of the embeddings: one table, or one of the source and one of the target."""
    return (
        Weight(shared, "embedding", TABLE, without="source_embedding"),
        Weight(encoder, "source_embedding", TABLE),
        Weight(decoder, "embedding", TABLE, beside="source_embedding"),
    )


# T5.

RMS = NormConfig(kind="rms")


def _t5_block(*, decoder: bool) -> BlockConfig:
    attention = AttentionConfig(bias=False, score=DotScore())
    position = T5RelativeBias(shared=True, bidirectional=not decoder)
    return BlockConfig(
        mixer=dataclasses.replace(attention, position=position),
        cross_attention=attention if decoder else None,
        feed_forward=FeedForwardConfig(bias=False),
        norm=RMS,
    )


def _read_t5(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    assert config.encoder is not None
    projection = fields.take("feed_forward_proj")
    gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    name = "gelu_new" if projection == "gated-gelu" else name  # as T5Config does
    if name not in ACTIVATION_NAMES:
        raise fields.unsupported("feed_forward_proj", "relu, gated-gelu and gated-silu")
    fields.expect("dense_act_fn", name)  # both repeat what `feed_forward_proj` says
    fields.expect("is_gated_act", gated)
    tied = fields.take("tie_word_embeddings", True)
    is_scaled = fields.take("scale_decoder_outputs", tied)
    changes = {
        "num_layers": fields.take("num_decoder_layers", config.encoder.num_layers),
        "tie_embeddings": tied,
        "logit_scale": config.d_model**-0.5 if is_scaled else 1.0,
    }
    for path in _on_both_sides("feed_forward"):
        changes |= {f"{path}.activation": ACTIVATION_NAMES[name], f"{path}.gated": gated}
    return with_settings(config, changes)


def _write_t5(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    name = name_of(ACTIVATION_NAMES, block.feed_forward.activation)
    if block.feed_forward.gated:
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    return {
        "num_decoder_layers": config.num_layers,
        "feed_forward_proj": name,
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
    base=TransformerConfig(
        layer_pattern=(_t5_block(decoder=True),),
        encoder=EncoderConfig(layer_pattern=(_t5_block(decoder=False),), final_norm=RMS),
        final_norm=RMS,
    ),
    settings=(
        Setting("vocab_size", "vocab_size", is_size=True),
        Setting("d_model", "d_model", is_size=True),
        Setting("num_layers", "encoder.num_layers", is_size=True),
        Setting("num_heads", _of_attention("num_heads"), is_size=True),
        Setting("d_kv", _of_attention("head_dim"), is_size=True),
        Setting("d_ff", _on_both_sides("feed_forward.d_ff"), is_size=True),
        Setting("relative_attention_num_buckets", _on_both_sides("mixer.position.num_buckets")),
        Setting("relative_attention_max_distance", _on_both_sides("mixer.position.max_distance")),
        Setting(
            "layer_norm_epsilon",
            (*_on_both_sides("norm.epsilon"), "encoder.final_norm.epsilon", "final_norm.epsilon"),
        ),
        Setting(
            "dropout_rate",
            (
                *_on_both_sides("residual_dropout"),
                *_on_both_sides("feed_forward.dropout"),
                *_of_attention("dropout"),
                "embedding_dropout",
            ),
        ),
    ),
    weights=(
        *tables("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        *_t5_stack("encoder", 1),
        *_t5_stack("decoder", 2),
        *self_attention(
            f"{DECODER_BLOCK}.EncDecAttention", "decoder/layers/cross", ("q", "k", "v", "o")
        ),
        *norm(f"{DECODER_BLOCK}.layer_norm", "decoder/layers/cross_norm"),
        Weight("lm_head.weight", "output"),
    ),
    expected={"is_causal": (None,)},  # it is of the encoder as well as the decoder
    constants={"is_encoder_decoder": True},
    read_rest=_read_t5,
    write_rest=_write_t5,
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)


# BART and Marian.

BART_BLOCK = BlockConfig(norm_placement="post")

EXPECTED: dict[str, tuple[Any, ...]] = {
    "add_bias_logits": (False,),
    "is_causal": (None,),  # it is of the encoder as well as the decoder
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
}
"""Fields of transformers 3, but for `is_causal`."""

BART_SETTINGS = (
    *COMMON,
    Setting("d_model", "d_model", is_size=True),
    Setting("encoder_layers", "encoder.num_layers", is_size=True),
    Setting("decoder_layers", "num_layers", is_size=True),
    Setting("encoder_attention_heads", "encoder.layer_pattern.mixer.num_heads", is_size=True),
    Setting(
        "decoder_attention_heads",
        ("layer_pattern.mixer.num_heads", "layer_pattern.cross_attention.num_heads"),
        is_size=True,
    ),
    Setting("encoder_ffn_dim", "encoder.layer_pattern.feed_forward.d_ff", is_size=True),
    Setting("decoder_ffn_dim", "layer_pattern.feed_forward.d_ff", is_size=True),
    Setting(
        "activation_function", _on_both_sides("feed_forward.activation"), choices=ACTIVATION_NAMES
    ),
    Setting("scale_embedding", "scale_embeddings"),
    Setting("dropout", (*_on_both_sides("residual_dropout"), "embedding_dropout")),
    Setting("activation_dropout", _on_both_sides("feed_forward.dropout")),
    Setting("attention_dropout", _of_attention("dropout")),
)


def _read_bart(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    # Without ties there are three tables: source, target and output.
    size = 0 if config.tie_embeddings else config.vocab_size
    return with_settings(config, {"encoder.vocab_size": size})


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
    base=TransformerConfig(
        layer_pattern=(dataclasses.replace(BART_BLOCK, cross_attention=AttentionConfig()),),
        encoder=EncoderConfig(layer_pattern=(BART_BLOCK,), final_norm=None),
        position_embedding=LearnedPositions(offset=2),
        embedding_norm=NormConfig(),
        final_norm=None,
    ),
    settings=(
        *BART_SETTINGS,
        Setting("max_position_embeddings", "position_embedding.max_length", is_size=True),
    ),
    weights=(
        *BART_TABLES,
        *bart_stack("encoder"),
        *bart_stack("decoder"),
        Weight("lm_head.weight", "output"),
    ),
    expected=EXPECTED
    | {
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
        "extra_pos_embeddings": (2,),
    },
    constants={"is_encoder_decoder": True},
    read_rest=_read_bart,
    prefix="model.",
    zeros=("final_logits_bias",),
)


def _read_marian(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    source_size = config.vocab_size
    target_size = fields.take("decoder_vocab_size", source_size)
    shared = fields.take("share_encoder_decoder_embeddings")
    if shared and not config.tie_embeddings:
        fields.expect("decoder_vocab_size", source_size)  # of the target alone, unlike the logits
    # Source and target may have tables of their own, of one size or of two.
    tables_are_one = shared and config.tie_embeddings
    sizes = {
        "vocab_size": source_size if shared else target_size,
        "encoder.vocab_size": 0 if tables_are_one else source_size,
    }
    return with_settings(config, sizes)


def _write_marian(config: TransformerConfig) -> dict[str, Any]:
    source_size = 0 if config.encoder is None else config.encoder.vocab_size
    return {
        "vocab_size": source_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": not source_size,
    }


MARIAN = Family(
    "marian",
    (Architecture("MarianMTModel", "encoder_decoder"),),
    base=dataclasses.replace(
        BART.base,
        position_embedding=SinusoidalPositions("halves"),
        embedding_norm=None,
        logit_bias=True,
    ),
    settings=BART_SETTINGS,
    weights=(
        *BART_TABLES,
        *bart_stack("encoder"),
        *bart_stack("decoder"),
        Weight("lm_head.weight", "output"),
        Weight("final_logits_bias", "output_bias", AsIs(leading=1)),
    ),
    expected=EXPECTED | {"normalize_embedding": (False,), "static_position_embeddings": (True,)},
    # The default, 58100, may be beyond the vocabulary.
    constants={"is_encoder_decoder": True, "pad_token_id": None},
    read_rest=_read_marian,
    write_rest=_write_marian,
    prefix="model.",
    # Sinusoids.
    ignored=(
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    ),
)

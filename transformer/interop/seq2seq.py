"""Encoder-decoders: T5 (with the gated v1.1), mT5, UMT5, BART, mBART, M2M-100, Pegasus and Marian.

mT5 (Xue et al. 2021) is T5 v1.1 without a scale of its logits. In UMT5 (Chung et al. 2023) each
layer has a relative bias of its own.

Marian (Junczys-Dowmunt et al. 2018), as the translation models of OPUS-MT have it, is BART's layout
with sinusoidal positions (all sines, then all cosines), no norm of the embeddings, a bias of the
logits, and tables that source and target share or not.

mBART (Liu et al. 2020), M2M-100 (Fan et al. 2021; NLLB has its type too) and Pegasus (Zhang et al.
2020) are BART's layout with norms before the sublayers. The latter two have sinusoids as positions.
LED (Beltagy et al. 2020, section 7) has Longformer's encoder, and a longer source than target.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.position_bias import T5RelativeBias
from transformer.attention.scores import DotScore
from transformer.attention.variants.longformer import LongformerConfig
from transformer.interop.bert import global_projections, read_one_sided_windows
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
    shortest_period,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, AsIs, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions, SinusoidalPositions
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, PoolerConfig, TransformerConfig


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


def _t5_block(*, decoder: bool, shared: bool) -> BlockConfig:
    attention = AttentionConfig(bias=False, score=DotScore())
    position = T5RelativeBias(shared=shared, bidirectional=not decoder)
    return BlockConfig(
        mixer=dataclasses.replace(attention, position=position),
        cross_attention=attention if decoder else None,
        feed_forward=FeedForwardConfig(bias=False),
        norm=RMS,
    )


def _t5_base(*, shared: bool) -> TransformerConfig:
    encoder = _t5_block(decoder=False, shared=shared)
    return TransformerConfig(
        layer_pattern=(_t5_block(decoder=True, shared=shared),),
        encoder=EncoderConfig(layer_pattern=(encoder,), final_norm=RMS),
        final_norm=RMS,
    )


def _read_mt5(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    assert config.encoder is not None
    projection = fields.take("feed_forward_proj")
    gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    name = "gelu_new" if projection == "gated-gelu" else name  # as T5Config does
    if name not in ACTIVATION_NAMES:
        raise fields.unsupported("feed_forward_proj", "relu, gated-gelu and gated-silu")
    fields.expect("dense_act_fn", name)  # both repeat what `feed_forward_proj` says
    fields.expect("is_gated_act", gated)
    changes = {
        "num_layers": fields.take("num_decoder_layers", config.encoder.num_layers),
        "tie_embeddings": fields.take("tie_word_embeddings", True),
    }
    for path in _on_both_sides("feed_forward"):
        changes |= {f"{path}.activation": ACTIVATION_NAMES[name], f"{path}.gated": gated}
    return with_settings(config, changes)


def _read_t5(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    config = _read_mt5(fields, config)
    is_scaled = fields.take("scale_decoder_outputs", config.tie_embeddings)
    return with_settings(config, {"logit_scale": config.d_model**-0.5 if is_scaled else 1.0})


def _write_mt5(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    name = name_of(ACTIVATION_NAMES, block.feed_forward.activation)
    if block.feed_forward.gated:
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    return {
        "num_decoder_layers": config.num_layers,
        "feed_forward_proj": name,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _write_t5(config: TransformerConfig) -> dict[str, Any]:
    return _write_mt5(config) | {"scale_decoder_outputs": config.logit_scale != 1}


def _t5_stack(side: str, feed_forward: int) -> tuple[Weight, ...]:
    block, ours = f"{side}.block.{{layer}}.layer", f"{side}/layers"
    dense, names = f"{block}.{feed_forward}.DenseReluDense", ("q", "k", "v", "o")
    up, gate = f"{ours}/feed_forward/up", f"{ours}/feed_forward/gate"
    bias = "SelfAttention.relative_attention_bias.weight"
    return (
        *self_attention(f"{block}.0.SelfAttention", f"{ours}/mixer", names),
        *norm(f"{block}.0.layer_norm", f"{ours}/mixer_norm"),
        # One table, which all layers share, or in UMT5 one of each layer.
        Weight(f"{side}.block.0.layer.0.{bias}", f"{side}/position_bias", AsIs()),
        Weight(f"{block}.0.{bias}", f"{ours}/mixer/position_bias", AsIs()),
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
    base=_t5_base(shared=True),
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

MT5 = dataclasses.replace(
    T5,
    model_type="mt5",
    architectures=(Architecture("MT5ForConditionalGeneration", "encoder_decoder"),),
    read_rest=_read_mt5,
    write_rest=_write_mt5,
)

UMT5 = dataclasses.replace(
    T5,
    model_type="umt5",
    architectures=(Architecture("UMT5ForConditionalGeneration", "encoder_decoder"),),
    base=_t5_base(shared=False),
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


def bart_stack(
    side: str,
    root: str = "model",
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
) -> tuple[Weight, ...]:
    """Return the rules of one side of BART, below `root`, with these projections of attention."""
    layer, ours = f"{root}.{side}.layers.{{layer}}", f"{side}/layers"
    cross: tuple[Weight, ...] = ()
    if side == "decoder":
        cross = (
            *self_attention(f"{layer}.encoder_attn", f"{ours}/cross", names),
            *norm(f"{layer}.encoder_attn_layer_norm", f"{ours}/cross_norm"),
        )
    return (
        Weight(f"{root}.{side}.embed_positions.weight", f"{side}/positions", TABLE),
        *norm(f"{root}.{side}.layernorm_embedding", f"{side}/embedding_norm"),
        *self_attention(f"{layer}.self_attn", f"{ours}/mixer", names),
        *norm(f"{layer}.self_attn_layer_norm", f"{ours}/mixer_norm"),
        *cross,
        *linear(f"{layer}.fc1", f"{ours}/feed_forward/up"),
        *linear(f"{layer}.fc2", f"{ours}/feed_forward/down"),
        *norm(f"{layer}.final_layer_norm", f"{ours}/feed_forward_norm"),
        *norm(f"{root}.{side}.layer_norm", f"{side}/final_norm"),  # of stacks with norms before
    )


SINUSOIDS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
"""Tensors of files that this library computes."""


def bart_tables(root: str = "model") -> tuple[Weight, ...]:
    """Return the rules of the embeddings below `root`."""
    encoder, decoder = (f"{root}.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    return (
        *tables(f"{root}.shared.weight", encoder, decoder),
        # One table of source and target beside an own output matrix: as two equal ones.
        *(
            Weight(name, "embedding", TABLE, without="source_embedding", beside="output")
            for name in (encoder, decoder)
        ),
    )


def _bart_classes(name: str) -> tuple[Architecture, Architecture]:
    """Return the encoder-decoder, and the classifier of its state at the last end token."""
    return (
        Architecture(f"{name}ForConditionalGeneration", "encoder_decoder"),
        Architecture(
            f"{name}ForSequenceClassification",
            "classifier",
            (
                *linear("classification_head.dense", "pooler"),
                *linear("classification_head.out_proj", "head"),
            ),
            pooler=lambda config: PoolerConfig(),
            pooling="last",
            has_end_token=True,
        ),
    )


BART = Family(
    "bart",
    _bart_classes("Bart"),
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
        *bart_tables(),
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


PRE_NORM = {"normalize_before": (True,), "add_final_layer_norm": (True,)}

MBART = dataclasses.replace(
    BART,
    model_type="mbart",
    architectures=_bart_classes("MBart"),
    base=with_settings(
        BART.base,
        {
            **dict.fromkeys(_on_both_sides("norm_placement"), "pre"),
            "encoder.final_norm": NormConfig(),
            "final_norm": NormConfig(),
        },
    ),
    expected={**BART.expected, **PRE_NORM},
)

M2M_100 = dataclasses.replace(
    MBART,
    model_type="m2m_100",
    architectures=(Architecture("M2M100ForConditionalGeneration", "encoder_decoder"),),
    base=dataclasses.replace(
        MBART.base,
        position_embedding=SinusoidalPositions("tensor2tensor", offset=2),
        embedding_norm=None,
    ),
    settings=BART_SETTINGS,
    # Positions begin after the padding token's id.
    expected=EXPECTED | PRE_NORM | {"normalize_embedding": (False,), "pad_token_id": (1,)},
    constants={"is_encoder_decoder": True, "pad_token_id": 1},
    ignored=("*.embed_positions.weights",),
    zeros=(),
)

PEGASUS = dataclasses.replace(
    MBART,
    model_type="pegasus",
    architectures=(Architecture("PegasusForConditionalGeneration", "encoder_decoder"),),
    base=dataclasses.replace(
        MBART.base, position_embedding=SinusoidalPositions("halves"), embedding_norm=None
    ),
    settings=BART_SETTINGS,
    expected=EXPECTED
    | PRE_NORM
    | {
        "normalize_embedding": (False,),
        "static_position_embeddings": (True,),
        "extra_pos_embeddings": (1,),
    },
    ignored=SINUSOIDS,
)


# LED: the encoder of Longformer.


def _read_led(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    config = _read_bart(fields, config)
    assert config.encoder is not None
    [block] = config.encoder.layer_pattern
    windows = read_one_sided_windows(fields, config.encoder.num_layers)
    blocks = [with_settings(block, {"mixer.one_sided_window": window}) for window in windows]
    return with_settings(config, {"encoder.layer_pattern": shortest_period(blocks)})


def _write_led(config: TransformerConfig) -> dict[str, Any]:
    assert config.encoder is not None
    pattern: Any = config.encoder.layer_pattern
    windows = [block.mixer.one_sided_window for block in pattern]
    depth = config.encoder.num_layers
    return {"attention_window": [2 * windows[layer % len(windows)] for layer in range(depth)]}


LOCAL, LOCAL_NAMES = "longformer_self_attn", ("query", "key", "value")

LED = dataclasses.replace(
    BART,
    model_type="led",
    architectures=(Architecture("LEDForConditionalGeneration", "encoder_decoder"),),
    # transformers takes the global tokens as an argument: for summaries the first one.
    base=with_settings(
        BART.base,
        {
            "encoder.layer_pattern.mixer": LongformerConfig(num_global_tokens=1),
            "position_embedding": LearnedPositions(),
        },
    ),
    settings=(
        *(each for each in BART_SETTINGS if each.theirs != "scale_embedding"),
        Setting("max_encoder_position_embeddings", "encoder.max_length", is_size=True),
        Setting("max_decoder_position_embeddings", "position_embedding.max_length", is_size=True),
    ),
    weights=(
        *bart_tables("led"),
        *bart_stack("encoder", "led", (*(f"{LOCAL}.{name}" for name in LOCAL_NAMES), "output")),
        *global_projections(
            f"led.encoder.layers.{{layer}}.self_attn.{LOCAL}", "encoder/layers/mixer"
        ),
        *bart_stack("decoder", "led"),
        Weight("lm_head.weight", "output"),
    ),
    expected={**BART.expected, "extra_pos_embeddings": (0,)},
    read_rest=_read_led,
    write_rest=_write_led,
    prefix="led.",
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
        *bart_tables(),
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
    ignored=SINUSOIDS,
)

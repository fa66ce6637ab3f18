"""Encoders with norms after the sublayers: BERT, RoBERTa and DistilBERT."""

from typing import Any

from transformer.attention.config import AttentionConfig
from transformer.attention.position_config import LearnedPositions
from transformer.config import BlockConfig, TransformerConfig
from transformer.interop.family import (
    Architecture,
    Family,
    activation_name,
    linear,
    norm,
    self_attention,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.config import FeedForwardConfig, NormConfig


def _encoder(
    *,
    vocab_size: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    activation: Any,
    norm_config: NormConfig,
    positions: LearnedPositions,
    num_token_types: int,
    dropout: float,
    attention_dropout: float,
    tied: bool,
) -> TransformerConfig:
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=num_heads, dropout=attention_dropout),
        feed_forward=FeedForwardConfig(d_ff=d_ff, activation=activation),
        norm=norm_config,
        norm_placement="post",
        residual_dropout=dropout,
    )
    return TransformerConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        layer_pattern=(block,),
        position_embedding=positions,
        embedding_norm=norm_config,
        embedding_dropout=dropout,
        num_token_types=num_token_types,
        causal=False,
        final_norm=None,
        tie_embeddings=tied,
    )


def _read_bert(fields: Fields, offset: int) -> TransformerConfig:
    fields.expect("position_embedding_type", "absolute")
    fields.expect("is_decoder", False)
    fields.expect("add_cross_attention", False)
    fields.expect("tie_word_embeddings", True)  # untied heads have a bias of their own
    if offset:
        fields.expect("pad_token_id", offset - 1)
    for name in ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"):
        fields.take(name, 0)  # of the first files of BERT; without effect
    fields.take("pooler_size_per_head", 0)
    fields.take("pooler_type", "")
    fields.take("directionality", "")
    return _encoder(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=fields.size("num_attention_heads"),
        d_ff=fields.size("intermediate_size"),
        activation=fields.choose("hidden_act", {"gelu": "gelu"}, "gelu"),
        norm_config=NormConfig(epsilon=fields.take("layer_norm_eps", 1e-12)),
        positions=LearnedPositions(fields.size("max_position_embeddings") - offset, offset),
        num_token_types=fields.take("type_vocab_size", 2),
        dropout=fields.take("hidden_dropout_prob", 0.1),
        attention_dropout=fields.take("attention_probs_dropout_prob", 0.1),
        tied=True,
    )


def _write_bert(config: TransformerConfig, offset: int) -> dict[str, Any]:
    if not config.num_token_types:
        # Their model adds a row of the table whatever its size: an empty one fails at run time.
        raise ValueError("model.num_token_types 0 (it has 1 or more)")
    block: Any = config.layer_pattern[0]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": block.mixer.num_heads,
        "intermediate_size": block.feed_forward.d_ff or 4 * config.d_model,
        "hidden_act": activation_name(block.feed_forward.activation),
        "layer_norm_eps": (config.embedding_norm or NormConfig()).epsilon,
        "max_position_embeddings": (config.max_length or 0) + offset,
        "type_vocab_size": config.num_token_types,
        "hidden_dropout_prob": block.residual_dropout,
        "attention_probs_dropout_prob": block.mixer.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        **({"pad_token_id": offset - 1} if offset else {}),
    }


def _body(root: str) -> tuple[Weight, ...]:
    layer = f"{root}.encoder.layer.{{layer}}"
    names = ("self.query", "self.key", "self.value", "output.dense")
    return (
        Weight(f"{root}.embeddings.word_embeddings.weight", "embedding", TABLE),
        Weight(f"{root}.embeddings.position_embeddings.weight", "positions", TABLE),
        Weight(f"{root}.embeddings.token_type_embeddings.weight", "types", TABLE),
        *norm(f"{root}.embeddings.LayerNorm", "embedding_norm"),
        *self_attention(f"{layer}.attention", "layers/mixer", names),
        *norm(f"{layer}.attention.output.LayerNorm", "layers/mixer_norm"),
        *linear(f"{layer}.intermediate.dense", "layers/feed_forward/up"),
        *linear(f"{layer}.output.dense", "layers/feed_forward/down"),
        *norm(f"{layer}.output.LayerNorm", "layers/feed_forward_norm"),
    )


BERT = Family(
    "bert",
    (
        Architecture(
            "BertForMaskedLM",
            "masked_lm",
            (
                *linear("cls.predictions.transform.dense", "head"),
                *norm("cls.predictions.transform.LayerNorm", "head_norm"),
                Weight("cls.predictions.bias", "head_output_bias"),
            ),
        ),
        Architecture(
            "BertForSequenceClassification",
            "classifier",
            (*linear("bert.pooler.dense", "pooler"), *linear("classifier", "head")),
            pooler=True,
        ),
        Architecture("BertForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    lambda fields: _read_bert(fields, 0),
    lambda config: _write_bert(config, 0),
    _body("bert"),
    prefix="bert.",
    # Copies of tied weights, buffers, and the heads of pretraining that these classes leave out.
    ignored=(
        "*.position_ids",
        "cls.predictions.decoder.*",
        "cls.seq_relationship.*",
        "bert.pooler.*",
    ),
)

ROBERTA = Family(
    "roberta",
    (
        Architecture(
            "RobertaForMaskedLM",
            "masked_lm",
            (
                *linear("lm_head.dense", "head"),
                *norm("lm_head.layer_norm", "head_norm"),
                Weight("lm_head.bias", "head_output_bias"),
            ),
        ),
        Architecture(
            "RobertaForSequenceClassification",
            "classifier",
            (*linear("classifier.dense", "pooler"), *linear("classifier.out_proj", "head")),
            pooler=True,
        ),
        Architecture("RobertaForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    lambda fields: _read_bert(fields, 2),
    lambda config: _write_bert(config, 2),
    _body("roberta"),
    prefix="roberta.",
    ignored=("*.position_ids", "lm_head.decoder.*", "roberta.pooler.*"),
)


def _read_distilbert(fields: Fields) -> TransformerConfig:
    fields.expect("sinusoidal_pos_embds", False)
    return _encoder(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("dim"),
        num_layers=fields.size("n_layers"),
        num_heads=fields.size("n_heads"),
        d_ff=fields.size("hidden_dim"),
        activation=fields.choose("activation", {"gelu": "gelu"}, "gelu"),
        norm_config=NormConfig(epsilon=1e-12),
        positions=LearnedPositions(fields.size("max_position_embeddings")),
        num_token_types=0,
        dropout=fields.take("dropout", 0.1),
        attention_dropout=fields.take("attention_dropout", 0.1),
        tied=fields.take("tie_word_embeddings", True),
    )


def _write_distilbert(config: TransformerConfig) -> dict[str, Any]:
    block: Any = config.layer_pattern[0]
    return {
        "vocab_size": config.vocab_size,
        "dim": config.d_model,
        "n_layers": config.num_layers,
        "n_heads": block.mixer.num_heads,
        "hidden_dim": block.feed_forward.d_ff or 4 * config.d_model,
        "activation": activation_name(block.feed_forward.activation),
        "max_position_embeddings": config.max_length or 0,
        "dropout": block.residual_dropout,
        "attention_dropout": block.mixer.dropout,
        "tie_word_embeddings": config.tie_embeddings,
    }


DISTIL = "distilbert.transformer.layer.{layer}"

DISTILBERT = Family(
    "distilbert",
    (
        Architecture(
            "DistilBertForMaskedLM",
            "masked_lm",
            (
                *linear("vocab_transform", "head"),
                *norm("vocab_layer_norm", "head_norm"),
                Weight("vocab_projector.bias", "head_output_bias"),
                Weight("vocab_projector.weight", "output"),
            ),
        ),
        Architecture("DistilBertForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    _read_distilbert,
    _write_distilbert,
    (
        Weight("distilbert.embeddings.word_embeddings.weight", "embedding", TABLE),
        Weight("distilbert.embeddings.position_embeddings.weight", "positions", TABLE),
        *norm("distilbert.embeddings.LayerNorm", "embedding_norm"),
        *self_attention(
            f"{DISTIL}.attention", "layers/mixer", ("q_lin", "k_lin", "v_lin", "out_lin")
        ),
        *norm(f"{DISTIL}.sa_layer_norm", "layers/mixer_norm"),
        *linear(f"{DISTIL}.ffn.lin1", "layers/feed_forward/up"),
        *linear(f"{DISTIL}.ffn.lin2", "layers/feed_forward/down"),
        *norm(f"{DISTIL}.output_layer_norm", "layers/feed_forward_norm"),
    ),
    prefix="distilbert.",
    ignored=("vocab_projector.weight", "*.position_ids"),
)

"""Encoders with norms after the sublayers: BERT, RoBERTa and DistilBERT."""

from collections.abc import Sequence
from typing import Any, get_args

from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
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
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.activations import MaskedHeadActivation
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import MaskedHeadConfig, TransformerConfig

HEAD_ACTIVATIONS = {
    name: ours for name, ours in ACTIVATION_NAMES.items() if ours in get_args(MaskedHeadActivation)
}
"""Activations of layers that a masked-token head can have too."""


def _encoder(
    *,
    vocab_size: int,
    d_model: int,
    num_layers: int,
    mixers: Sequence[MixerConfig],
    d_ff: int,
    activation: Any,
    head_activation: Any,
    norm_config: NormConfig,
    positions: LearnedPositions,
    num_token_types: int,
    dropout: float,
    tied: bool,
) -> TransformerConfig:
    blocks = [
        BlockConfig(
            mixer=mixer,
            feed_forward=FeedForwardConfig(d_ff=d_ff, activation=activation),
            norm=norm_config,
            norm_placement="post",
            residual_dropout=dropout,
        )
        for mixer in mixers
    ]
    return TransformerConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        layer_pattern=tuple(blocks),
        position_embedding=positions,
        embedding_norm=norm_config,
        embedding_dropout=dropout,
        num_token_types=num_token_types,
        causal=False,
        final_norm=None,
        masked_head=MaskedHeadConfig(activation=head_activation),
        tie_embeddings=tied,
    )


def read_attention(fields: Fields, **settings: Any) -> AttentionConfig:
    """Return the attention of BERT and its relatives."""
    return AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        dropout=fields.take("attention_probs_dropout_prob"),
        **settings,
    )


def read_bert(fields: Fields, offset: int, mixers: Sequence[MixerConfig] = ()) -> TransformerConfig:
    """Return the config of BERT or a relative with its fields.

    Args:
      fields: Fields of the config.
      offset: Rows before that of position 0. Without one the masked-token head has the activation
        of the layers, with one it is RoBERTa's, which has GELU.
      mixers: Mixers of the layer pattern; default: full attention.
    """
    fields.expect("position_embedding_type", "absolute")  # of transformers 4
    fields.expect("is_causal", False)
    if offset:
        fields.expect("pad_token_id", offset - 1)
    name = fields.choose("hidden_act", HEAD_ACTIVATIONS)
    return _encoder(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        mixers=mixers or (read_attention(fields),),
        d_ff=fields.size("intermediate_size"),
        activation=name,
        head_activation="gelu" if offset else name,
        norm_config=NormConfig(epsilon=fields.take("layer_norm_eps")),
        positions=LearnedPositions(fields.size("max_position_embeddings") - offset, offset),
        num_token_types=fields.take("type_vocab_size"),
        dropout=fields.take("hidden_dropout_prob"),
        tied=fields.take("tie_word_embeddings"),
    )


def write_bert(config: TransformerConfig, offset: int) -> dict[str, Any]:
    """Return the fields of BERT or a relative."""
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


def bert_body(root: str) -> tuple[Weight, ...]:
    """Return the rules of embeddings and layers, below `root`."""
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


def masked_head(dense: str, norm_name: str, root: str) -> tuple[Weight, ...]:
    """Return the rules of a masked-token head, tied or not."""
    return (
        *linear(dense, "head"),
        *norm(norm_name, "head_norm"),
        # Two names of one bias: files with an untied output matrix have both.
        Weight(f"{root}.bias", "head_output_bias"),
        Weight(f"{root}.decoder.bias", "head_output_bias", beside="output"),
        Weight(f"{root}.decoder.weight", "output"),
    )


BERT_HEAD = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
)
ROBERTA_HEAD = masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head")

BERT = Family(
    "bert",
    (
        Architecture("BertForMaskedLM", "masked_lm", BERT_HEAD),
        Architecture(
            "BertForSequenceClassification",
            "classifier",
            (*linear("bert.pooler.dense", "pooler"), *linear("classifier", "head")),
            pooler=True,
        ),
        Architecture("BertForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    lambda fields: read_bert(fields, 0),
    lambda config: write_bert(config, 0),
    bert_body("bert"),
    prefix="bert.",
    # Buffers, and the heads of pretraining that these classes leave out.
    ignored=("*.position_ids", "cls.seq_relationship.*", "bert.pooler.*"),
)

ROBERTA = Family(
    "roberta",
    (
        Architecture("RobertaForMaskedLM", "masked_lm", ROBERTA_HEAD),
        Architecture(
            "RobertaForSequenceClassification",
            "classifier",
            (*linear("classifier.dense", "pooler"), *linear("classifier.out_proj", "head")),
            pooler=True,
        ),
        Architecture("RobertaForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    lambda fields: read_bert(fields, 2),
    lambda config: write_bert(config, 2),
    bert_body("roberta"),
    prefix="roberta.",
    ignored=("*.position_ids", "roberta.pooler.*"),
)


def _read_distilbert(fields: Fields) -> TransformerConfig:
    fields.expect("is_causal", False)
    activation = fields.choose("activation", HEAD_ACTIVATIONS)
    return _encoder(
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("dim"),
        num_layers=fields.size("n_layers"),
        mixers=(
            AttentionConfig(
                num_heads=fields.size("n_heads"), dropout=fields.take("attention_dropout")
            ),
        ),
        d_ff=fields.size("hidden_dim"),
        activation=activation,
        head_activation=activation,
        norm_config=NormConfig(epsilon=1e-12),
        positions=LearnedPositions(fields.size("max_position_embeddings")),
        num_token_types=0,
        dropout=fields.take("dropout"),
        tied=fields.take("tie_word_embeddings"),
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
    ignored=("*.position_ids",),
)

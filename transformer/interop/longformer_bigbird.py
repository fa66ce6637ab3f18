"""Encoders for long inputs, with BERT's layout: Longformer and BigBird.

BigBird is read with full attention alone. Its sparse attention draws random blocks by NumPy's
generator while a model runs, another pattern than that of the mixer `bigbird`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.variants.longformer import LongformerConfig
from transformer.interop.bert import (
    BERT_HEAD,
    ROBERTA_HEAD,
    bert_body,
    read_attention,
    read_bert,
    write_bert,
)
from transformer.interop.family import Architecture, Family, linear, shortest_period
from transformer.interop.fields import Fields
from transformer.models.config import TransformerConfig


def _read_longformer(fields: Fields) -> TransformerConfig:
    depth = fields.size("num_hidden_layers")
    windows = fields.take("attention_window", ())
    windows = [windows] * depth if isinstance(windows, int) else windows
    is_even = isinstance(windows, Sequence) and all(
        isinstance(each, int) and each > 0 and each % 2 == 0 for each in windows
    )
    if not is_even or len(windows) != depth:
        raise fields.unsupported("attention_window", f"{depth} even numbers, one for each layer")
    heads = fields.size("num_attention_heads")
    dropout = fields.take("attention_probs_dropout_prob")
    mixers = [
        # transformers takes the global tokens as an argument: for classification the first one.
        LongformerConfig(
            num_heads=heads, one_sided_window=window // 2, num_global_tokens=1, dropout=dropout
        )
        for window in windows
    ]
    return read_bert(fields, 2, shortest_period(mixers))


def _write_longformer(config: TransformerConfig) -> dict[str, Any]:
    pattern: Any = config.layer_pattern
    mixers = [pattern[layer % len(pattern)].mixer for layer in range(config.num_layers)]
    windows = [2 * mixer.one_sided_window for mixer in mixers]
    return write_bert(config, 2) | {"attention_window": windows}


def _global_projections(root: str) -> Any:
    own = f"{root}.encoder.layer.{{layer}}.attention.self"
    return tuple(
        rule
        for name in ("query", "key", "value")
        for rule in linear(f"{own}.{name}_global", f"layers/mixer/{name}_global")
    )


LONGFORMER = Family(
    "longformer",
    (
        Architecture("LongformerForMaskedLM", "masked_lm", ROBERTA_HEAD),
        Architecture(
            "LongformerForSequenceClassification",
            "classifier",
            (*linear("classifier.dense", "pooler"), *linear("classifier.out_proj", "head")),
            pooler=True,
        ),
        Architecture("LongformerForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    _read_longformer,
    _write_longformer,
    (*bert_body("longformer"), *_global_projections("longformer")),
    prefix="longformer.",
    ignored=("*.position_ids", "longformer.pooler.*"),
)


def _read_big_bird(fields: Fields) -> TransformerConfig:
    if fields.take("attention_type") != "original_full":
        raise fields.unsupported(
            "attention_type",
            "'original_full', which has the same weights: set it in config.json. The random "
            "blocks of block_sparse are drawn by NumPy while transformers runs the model",
        )
    bias = fields.take("use_bias")
    attention = read_attention(fields, bias=bias, output_bias=None if bias else True)
    config = read_bert(fields, 0, (attention,))
    return dataclasses.replace(config, scale_embeddings=fields.take("rescale_embeddings"))


def _write_big_bird(config: TransformerConfig) -> dict[str, Any]:
    mixer: Any = config.layer_pattern[0].mixer
    return write_bert(config, 0) | {
        "attention_type": "original_full",
        "use_bias": isinstance(mixer, AttentionConfig) and mixer.bias,
        "rescale_embeddings": config.scale_embeddings,
    }


BIG_BIRD = Family(
    "big_bird",
    (
        Architecture("BigBirdForMaskedLM", "masked_lm", BERT_HEAD),
        Architecture("BigBirdForTokenClassification", "tagger", linear("classifier", "head")),
    ),
    _read_big_bird,
    _write_big_bird,
    bert_body("bert"),
    prefix="bert.",
    ignored=("*.position_ids", "cls.seq_relationship.*", "bert.pooler.*"),
)

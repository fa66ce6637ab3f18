"""BERT in this library: its configuration, and its weights from Hugging Face.

`read(name, shape)` returns a weight by its Hugging Face name.
"""

import numpy as np

from tests.fixtures.tiny import Array, Sizes
from tests.transformer.layouts import (
    Params,
    Read,
    attention,
    feed_forward,
    layer_norm,
    linear,
    stacked,
)
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    TransformerConfig,
)


def bert_config(sizes: Sizes, vocab_multiple: int = 1, pooler: bool = False) -> TransformerConfig:
    norm = NormConfig(epsilon=sizes.epsilon)
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=sizes.heads),
        feed_forward=FeedForwardConfig(d_ff=sizes.hidden, activation="gelu"),
        norm=norm,
        norm_placement="post",
    )
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(sizes.length),
        embedding_norm=norm,
        num_token_types=sizes.types,
        causal=False,
        pooler=pooler,
        final_norm=None,
        pad_vocab_to_multiple=vocab_multiple,
    )


def bert_params(read: Read, sizes: Sizes, rows: int) -> Params:
    """Return the parameters below the heads; the embedding gets `rows` rows."""
    at, d = "bert.embeddings", sizes.width
    layers = [bert_layer(read, f"bert.encoder.layer.{i}", sizes) for i in range(sizes.layers)]
    words = read(f"{at}.word_embeddings.weight", (sizes.vocab, d))
    return {
        "embedding": pad_rows(words, rows),
        "positions": read(f"{at}.position_embeddings.weight", (sizes.length, d)),
        "types": read(f"{at}.token_type_embeddings.weight", (sizes.types, d)),
        "embedding_norm": layer_norm(read, f"{at}.LayerNorm", d),
        "layers": {"place_0": stacked(layers)},
    }


def bert_layer(read: Read, at: str, sizes: Sizes) -> Params:
    d, f = sizes.width, sizes.hidden
    inner = [
        linear(read, f"{at}.attention.self.{name}", d, d) for name in ("query", "key", "value")
    ]
    output = linear(read, f"{at}.attention.output.dense", d, d)
    up = linear(read, f"{at}.intermediate.dense", d, f)
    down = linear(read, f"{at}.output.dense", f, d)
    return {
        "mixer": attention(inner, output, sizes.heads),
        "mixer_norm": layer_norm(read, f"{at}.attention.output.LayerNorm", d),
        "feed_forward": feed_forward(up, down),
        "feed_forward_norm": layer_norm(read, f"{at}.output.LayerNorm", d),
    }


def masked_head(read: Read, sizes: Sizes, rows: int) -> Params:
    """Return the parameters of the head of `MaskedLanguageModel`."""
    at, d = "cls.predictions", sizes.width
    matrix, bias = linear(read, f"{at}.transform.dense", d, d)
    return {
        "head": matrix,
        "head_bias": bias,
        "head_norm": layer_norm(read, f"{at}.transform.LayerNorm", d),
        "head_output_bias": pad_rows(read(f"{at}.bias", (sizes.vocab,)), rows),
    }


def pooler(read: Read, sizes: Sizes) -> Params:
    matrix, bias = linear(read, "bert.pooler.dense", sizes.width, sizes.width)
    return {"pooler": matrix, "pooler_bias": bias}


def class_head(read: Read, sizes: Sizes) -> Params:
    """Return the parameters of the heads of `Classifier` and `Tagger`."""
    matrix, bias = linear(read, "classifier", sizes.width, sizes.classes)
    return {"head": matrix, "head_bias": bias}


def pad_rows(table: Array, rows: int) -> Array:
    """Pad a table with rows of zeros after the vocabulary."""
    return np.pad(table, [(0, rows - len(table))] + [(0, 0)] * (table.ndim - 1))

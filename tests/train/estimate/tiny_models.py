"""Models of small prime sizes, described for batches of 5 x 11 tokens."""

import dataclasses
from typing import Any

from train.estimate.description import Description, describe_model
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    Hardware,
    LanguageModel,
    LearnedPositions,
    TransformerConfig,
)

# D 7, N 3, K 1, H 5 (values 11), F 13, V 17 padded to 24 rows, 19 positions, L 3: 2,414 parameters,
# 2,463 with padding. B 5, T 11.
BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=5, value_head_dim=11),
    feed_forward=FeedForwardConfig(d_ff=13),
)
TINY = TransformerConfig(
    vocab_size=17,
    pad_vocab_to_multiple=8,
    d_model=7,
    num_layers=3,
    layer_pattern=(BLOCK,),
    position_embedding=LearnedPositions(19),
)
TOKENS = 5 * 11
LAYER_ELEMENTS = TOKENS * (14 * 7 + 11 * 3)
"""B T (14 D + T N): the textbook's activations of one layer."""
WORKING_BYTES = 12 * LAYER_ELEMENTS + 8 * TOKENS * 24
"""Activations of three layers in float32, and the logits with their gradient."""

# A decoder of 2 layers: D 4, N 2, K 1, H 3 (values 5) in both attentions, F 6, V 10 padded to 16
# rows. An encoder of 3 layers with a source vocabulary of 9 tokens.
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=3, value_head_dim=5)
ENCODER_BLOCK = BlockConfig(mixer=ATTENTION, feed_forward=FeedForwardConfig(d_ff=6))
TRANSLATOR = TransformerConfig(
    vocab_size=10,
    pad_vocab_to_multiple=8,
    d_model=4,
    num_layers=2,
    layer_pattern=(dataclasses.replace(ENCODER_BLOCK, cross_attention=ATTENTION),),
    position_embedding=LearnedPositions(19),
    tie_embeddings=False,
    encoder=EncoderConfig(3, (ENCODER_BLOCK,), vocab_size=9),
)


def describe_tiny(
    config: TransformerConfig,
    hardware: Hardware | None = None,
    **options: Any,
) -> Description:
    """Describe a language model."""
    model = LanguageModel(config, hardware or Hardware())
    return describe_model(model, batch_size=5, sequence_length=11, **options)


def describe_translator(config: TransformerConfig) -> Description:
    """Describe an encoder-decoder."""
    return describe_model(EncoderDecoder(config), batch_size=5, sequence_length=11)

"""Models of small prime sizes, described for batches of 5 x 11 tokens."""

import dataclasses
from typing import Any

from train.data.bitext import BitextDataConfig
from train.data.data_config import TextDataConfig
from train.estimate.describe import Description, describe
from train.experiment import Experiment
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    Hardware,
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
    *,
    sequence_length: int = 11,
    **settings: Any,
) -> Description:
    """Describe a language model."""
    data = TextDataConfig(sequence_length=sequence_length)
    return describe(Experiment(model=config, data=data, batch_size=5, **settings), hardware)


def describe_translator(config: TransformerConfig) -> Description:
    """Describe an encoder-decoder."""
    data = BitextDataConfig(max_length=11)
    return describe(Experiment(model=config, task=Translation(), data=data, batch_size=5))

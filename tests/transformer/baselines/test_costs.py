"""FLOPs of recurrent models, counted from their weights and shapes."""

import dataclasses

from transformer import (
    BlockConfig,
    ConvolutionConfig,
    ElmanConfig,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    LSTMConfig,
    TransformerConfig,
)
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.flops import count_token_flops

V, D, T = 17, 6, 23
PLAIN = BlockConfig(mixer=LSTMConfig(), feed_forward=None, norm=None)


def model(*blocks: BlockConfig) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=V, d_model=D, num_layers=len(blocks), layer_pattern=blocks, final_norm=None
    )


def test_recurrent_flops_are_weight_products() -> None:
    mixers = (LSTMConfig(hidden_size=5), ElmanConfig(), ConvolutionConfig(kernel_size=3))
    blocks = [dataclasses.replace(PLAIN, mixer=mixer) for mixer in mixers]
    flops = count_token_flops(LanguageModel(model(*blocks)), T)
    lstm, elman, convolution = 4 * 5 * (D + 5) + 5 * D, 2 * D * D, 3 * D * D
    assert flops.projections == 2 * (lstm + elman + convolution)
    assert (flops.scores, flops.scores_causal, flops.uncounted) == (0, 0, ())


def test_attentional_decoder_flops_include_the_source() -> None:
    mixers = (BahdanauConfig(hidden_size=5, score_size=3), LuongConfig(), Seq2SeqConfig())
    blocks = [dataclasses.replace(PLAIN, mixer=mixer) for mixer in mixers]
    encoder = EncoderConfig(num_layers=1, layer_pattern=(PLAIN,), final_norm=None)
    config = dataclasses.replace(model(*blocks), encoder=encoder)
    flops = count_token_flops(EncoderDecoder(config), T)
    assert flops.scores == flops.scores_causal == 2 * T * ((3 + D) + (D + D))
    assert flops.uncounted == ()

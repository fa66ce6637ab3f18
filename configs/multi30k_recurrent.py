"""Multi30k with the recurrent translation systems that the transformer replaced.

    python -m train fit multi30k_recurrent:luong --data.path multi30k/raw/train \
        --data.validation-path multi30k/raw/val --data.test-path multi30k/raw/test_2016_flickr

| experiment | encoder                     | decoder                                            |
| ---------- | --------------------------- | -------------------------------------------------- |
| `seq2seq`  | LSTMs                       | LSTMs; the last vector of the source is their      |
|            |                             | initial state (Sutskever et al. 2014)              |
| `bahdanau` | bidirectional LSTMs         | a GRU that attends before each step (2015)         |
| `luong`    | LSTMs                       | an LSTM that attends after each step (2015)        |
| `gnmt`     | bidirectional, residual     | attention in the first layer, shared by all others |
|            |                             | (Wu et al. 2016)                                   |

Data and vocabulary are those of `multi30k`. Trained by Adam, with clipped gradients.
"""

import dataclasses

from configs.multi30k import EXPERIMENTS as MULTI30K
from train.experiment import Experiment
from train.optim.elementwise import Adam
from train.optim.schedules import ScheduleConfig
from transformer import BlockConfig, EncoderConfig, Initialization, MixerConfig, TransformerConfig
from transformer.baselines.bahdanau import BahdanauConfig
from transformer.baselines.lstm_seq2seq import Seq2SeqConfig
from transformer.baselines.luong import LuongConfig
from transformer.baselines.model_configs import gnmt_config
from transformer.baselines.recurrent import LSTMConfig

WIDTH, DROPOUT = 256, 0.3


def recurrent_layer(mixer: MixerConfig) -> BlockConfig:
    """Return a recurrent layer, without feed-forward, norm or residual."""
    return BlockConfig(
        mixer=mixer, feed_forward=None, norm=None, residual=False, residual_dropout=DROPOUT
    )


def recurrent_model(decoder: MixerConfig, *, bidirectional: bool = False) -> TransformerConfig:
    """Return an encoder of two LSTMs, and a decoder of an LSTM and the given recurrence."""
    return TransformerConfig(
        d_model=WIDTH,
        num_layers=2,
        layer_pattern=(recurrent_layer(LSTMConfig()), recurrent_layer(decoder)),
        encoder=EncoderConfig(
            num_layers=2,
            layer_pattern=(recurrent_layer(LSTMConfig(bidirectional=bidirectional)),),
            final_norm=None,
        ),
        final_norm=None,
        embedding_dropout=DROPOUT,
        initialization=Initialization(std=0, embedding_std=0.1),
    )


def make_experiment(name: str, config: TransformerConfig) -> Experiment:
    """Return `multi30k` with another model, trained by Adam with clipped gradients."""
    return dataclasses.replace(
        MULTI30K["multi30k"],
        name=f"multi30k-{name}",
        model=config,
        optimizer=Adam(beta2=0.98, max_grad_norm=1.0),
        schedule=ScheduleConfig("cosine", learning_rate=2e-3, warmup_steps=200, min_lr_ratio=0.02),
    )


EXPERIMENTS = {
    "seq2seq": make_experiment("seq2seq", recurrent_model(Seq2SeqConfig())),
    "bahdanau": make_experiment("bahdanau", recurrent_model(BahdanauConfig(), bidirectional=True)),
    "luong": make_experiment("luong", recurrent_model(LuongConfig())),
    "gnmt": make_experiment(
        "gnmt",
        gnmt_config(
            WIDTH,
            num_layers=3,
            dropout=DROPOUT,
            initialization=Initialization(std=0, embedding_std=0.1),
        ),
    ),
}

"""Multi30k by the recurrent systems that the transformer replaced.

    python -m train fit multi30k_recurrent:luong --data.path multi30k/raw/train \
        --data.validation-path multi30k/raw/val --data.test-path multi30k/raw/test_2016_flickr

| experiment | encoder                     | decoder                                            |
| ---------- | --------------------------- | -------------------------------------------------- |
| `seq2seq`  | LSTMs                       | LSTMs, the second begun from the source's last     |
|            |                             | vector (Sutskever et al. 2014)                     |
| `bahdanau` | LSTMs that read both ways   | a gated unit that looks before each step (2015)    |
| `luong`    | LSTMs                       | an LSTM that looks after each step (2015)          |
| `gnmt`     | both ways, then residuals   | its first layer looks for all others (Wu 2016)     |

Data and words are those of `multi30k`. Trained by Adam, with clipped gradients.
"""

import dataclasses

from configs.multi30k import EXPERIMENTS as MULTI30K
from train.experiment import Experiment
from train.optimizers import Adam
from train.schedules import ScheduleConfig
from transformer import BlockConfig, EncoderConfig, Initialization, MixerConfig, TransformerConfig
from transformer.gnmt import gnmt
from transformer.recurrent import BahdanauConfig, LSTMConfig, LuongConfig, Seq2SeqConfig

WIDTH, DROPOUT = 256, 0.3


def layer(mixer: MixerConfig) -> BlockConfig:
    """A recurrent layer: no feed-forward, norm or residual."""
    return BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False, dropout=DROPOUT)


def model(decoder: MixerConfig, *, bidirectional: bool = False) -> TransformerConfig:
    """Two LSTMs that read; an LSTM and the decoder's recurrence that write."""
    return TransformerConfig(
        width=WIDTH,
        layers=2,
        pattern=(layer(LSTMConfig()), layer(decoder)),
        encoder=EncoderConfig(
            layers=2, pattern=(layer(LSTMConfig(bidirectional=bidirectional)),), final_norm=None
        ),
        final_norm=None,
        dropout=DROPOUT,
        initialization=Initialization(std=0, embedding_std=0.1),
    )


def experiment(name: str, config: TransformerConfig) -> Experiment:
    """`multi30k` with another model, and what recurrences are trained with."""
    return dataclasses.replace(
        MULTI30K["multi30k"],
        name=f"multi30k-{name}",
        model=config,
        optimizer=Adam(beta2=0.98, clip=1.0),
        schedule=ScheduleConfig("cosine", learning_rate=2e-3, warmup=200, final=0.02),
    )


EXPERIMENTS = {
    "seq2seq": experiment("seq2seq", model(Seq2SeqConfig())),
    "bahdanau": experiment("bahdanau", model(BahdanauConfig(), bidirectional=True)),
    "luong": experiment("luong", model(LuongConfig())),
    "gnmt": experiment(
        "gnmt",
        gnmt(
            WIDTH,
            layers=3,
            dropout=DROPOUT,
            initialization=Initialization(std=0, embedding_std=0.1),
        ),
    ),
}

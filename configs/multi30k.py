"""Multi30k, English to German (Elliott et al. 2016): 29,000 captions, small enough for a CPU.

    python -m train fit multi30k --data.path multi30k/raw/train \
        --data.validation-path multi30k/raw/val --data.test-path multi30k/raw/test_2016_flickr
    python -m train evaluate runs/multi30k --split test

4 + 4 layers of width 128, feed-forward 256, dropout 0.3: the size that Wu et al. 2021 found best
for this corpus. Text is lower-cased, with one BPE for both languages. The last checkpoints are
averaged.
"""

import dataclasses

from train.data.bitext import BitextDataConfig
from train.data.data_config import TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    SinusoidalPositions,
    TransformerConfig,
)

WIDTH, DROPOUT = 128, 0.3

_ATTENTION = AttentionConfig(num_heads=4, bias=False)
_BLOCK = BlockConfig(
    mixer=_ATTENTION,
    feed_forward=FeedForwardConfig(256, activation="relu"),
    norm=NormConfig("layer"),
    residual_dropout=DROPOUT,
)

EXPERIMENTS = {
    "multi30k": Experiment(
        name="multi30k",
        task=Translation(label_smoothing=0.1, num_beams=5, length_penalty=1.0),
        model=TransformerConfig(
            d_model=WIDTH,
            num_layers=4,
            layer_pattern=(dataclasses.replace(_BLOCK, cross_attention=_ATTENTION),),
            position_embedding=SinusoidalPositions(),
            scale_embeddings=True,
            encoder=EncoderConfig(num_layers=4, layer_pattern=(_BLOCK,)),
            embedding_dropout=DROPOUT,
            initialization=Initialization(std=0, embedding_std=WIDTH**-0.5),
        ),
        data=BitextDataConfig(
            path="multi30k/raw/train",
            validation_path="multi30k/raw/val",
            test_path="multi30k/raw/test_2016_flickr",
            max_length=64,
            batch_tokens=4096,
            tokenizer=TokenizerConfig("bpe", vocab_size=8000, lowercase=True),
        ),
        optimizer=Muon(beta2=0.98, weight_decay=0.05),
        schedule=ScheduleConfig("cosine", learning_rate=4e-3, warmup_steps=200, min_lr_ratio=0.02),
        steps=3000,
        batch_size=0,  # as many as data.batch_tokens allows
        log_every=20,
        evaluation=EvaluationConfig(every=300, num_batches=0, average_checkpoints=5),
        sample=SampleConfig(every=600, prompt="two young men are playing football in a park ."),
        checkpoint=CheckpointConfig(every=100, keep_last=5),
    )
}

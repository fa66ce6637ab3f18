"""TREC (Li and Roth 2002): the type of answer (of six) that a question asks for.

    python -m train fit trec --data.path trec/TREC.train.all --data.test-path trec/TREC.test.all
    python -m train evaluate runs/trec --split test

5,452 training and 500 test questions. A small word-level encoder,
trained from scratch; `trec:bag` is a baseline: embedding, MLP, mean, logistic regression.
`trec:hybrid` has a bidirectional LSTM below one layer of attention, and is best started from word
vectors (`--init-from FILE`, which `python -m bench word_vectors --save FILE` trains).
"""

import dataclasses

from train.data.data_config import TokenizerConfig
from train.data.text_labels import ClassificationDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.classification import Classification
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    SinusoidalPositions,
    TransformerConfig,
)
from transformer.baselines.model_configs import bag_of_embeddings_config
from transformer.baselines.recurrent import LSTMConfig

WIDTH = 128

_BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=4),
    feed_forward=FeedForwardConfig(256, activation="gelu"),
    norm=NormConfig("layer"),
    residual_dropout=0.3,
)

_TREC = Experiment(
    name="trec",
    task=Classification(pooling="mean", classifier_dropout=0.3),
    model=TransformerConfig(
        d_model=WIDTH,
        num_layers=2,
        layer_pattern=(_BLOCK,),
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        causal=False,
        embedding_dropout=0.5,
        initialization=Initialization(std=0, embedding_std=WIDTH**-0.5),
    ),
    data=ClassificationDataConfig(
        path="trec/TREC.train.all",
        test_path="trec/TREC.test.all",
        format="label_first",
        coarse_labels=True,
        encoding="latin-1",
        max_length=48,
        tokenizer=TokenizerConfig("word", vocab_size=8000, lowercase=True),
    ),
    optimizer=AdamW(beta2=0.98, weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=100, min_lr_ratio=0.0),
    steps=1500,
    batch_size=64,
    evaluation=EvaluationConfig(every=150, num_batches=0),
    sample=SampleConfig(every=500, prompt="Who wrote the play Hamlet ?"),
    checkpoint=CheckpointConfig(every=500),
)

_BAG = dataclasses.replace(
    _TREC,
    name="trec-bag",
    model=bag_of_embeddings_config(
        WIDTH,
        256,
        dropout=0.3,
        initialization=Initialization(std=0, embedding_std=0.1),
    ),
)

_LSTM = BlockConfig(
    mixer=LSTMConfig(bidirectional=True), feed_forward=None, norm=None, residual=False
)

_HYBRID = dataclasses.replace(
    _TREC,
    name="trec-hybrid",
    model=dataclasses.replace(_TREC.model, layer_pattern=(_LSTM, _BLOCK)),
)

EXPERIMENTS = {"trec": _TREC, "hybrid": _HYBRID, "bag": _BAG}

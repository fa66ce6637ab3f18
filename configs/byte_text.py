"""Sentiment of a text, byte by byte: the text task of the Long Range Arena (Tay et al. 2021).

    python -m train fit byte_text --data.path sst2/train.tsv \
        --data.validation-path sst2/dev.tsv --data.test-path sst2/test.tsv
    python -m train fit byte_text:arena_performer \
        --data.path imdb/train.tsv --data.test-path imdb/test.tsv

One experiment for each attention variant, as in `listops`. The first group reads the sentences of
SST-2 (Socher et al. 2013), truncated to 256 bytes, with a size for two cores. `arena_...` have the
arena's length (4,000 bytes) and 6 layers x 512, 8 heads, 20,000 steps, for IMDb's reviews, in files
with columns `label` and `text`; the arena's own code has 4 layers x 256 with 4 heads.
"""

import dataclasses

from configs.listops import ARENA, SMALL, variant_experiments
from configs.sst2 import SENTENCES
from train.data.data_config import TokenizerConfig
from train.data.text_labels import ClassificationDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.classification import Classification
from transformer import TransformerConfig

_SMALL = Experiment(
    name="byte_text",
    task=Classification(num_labels=2),
    model=TransformerConfig(causal=False),
    data=dataclasses.replace(
        SENTENCES,
        max_length=SMALL.sequence_length,
        max_buckets=1,
        tokenizer=TokenizerConfig("byte"),
    ),
    optimizer=AdamW(beta2=0.98, weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=50, min_lr_ratio=0.0),
    steps=300,
    batch_size=16,
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every=100),
)

_LONG = dataclasses.replace(ARENA, sequence_length=4000)

_ARENA = dataclasses.replace(
    _SMALL,
    name="byte_text-arena",
    data=ClassificationDataConfig(
        path="imdb/train.tsv",
        test_path="imdb/test.tsv",
        max_length=_LONG.sequence_length,
        max_buckets=1,
        tokenizer=TokenizerConfig("byte"),
    ),
    schedule=ScheduleConfig("inverse_sqrt", learning_rate=0.05 * 8000**-0.5, warmup_steps=8000),
    steps=20_000,
    batch_size=32,
    evaluation=EvaluationConfig(every=1000, num_batches=20),
    checkpoint=CheckpointConfig(every=1000),
)

EXPERIMENTS = variant_experiments(_SMALL, SMALL) | variant_experiments(_ARENA, _LONG, "arena_")

# As `python -m train configs` lists them, without running this file.
NAMES = (
    "full",
    "sliding_window",
    "longformer",
    "bigbird",
    "sparse",
    "performer",
    "linear",
    "linformer",
    "routing",
    "top_k",
    "reformer",
    "arena_full",
    "arena_sliding_window",
    "arena_longformer",
    "arena_bigbird",
    "arena_sparse",
    "arena_performer",
    "arena_linear",
    "arena_linformer",
    "arena_routing",
    "arena_top_k",
    "arena_reformer",
)

"""SST-2 (Socher et al. 2013): the sentiment of a sentence of a film review.

    python -m train fit sst2 --data.path sst2/train.tsv \
        --data.validation-path sst2/dev.tsv --data.test-path sst2/test.tsv
    python -m train evaluate runs/sst2 --split test

6,920 full sentences (not the phrases of GLUE), with the encoder of `trec`.

`sst2:bag` is the bag of embeddings of `trec:bag`, trained on the labeled phrases of the same
sentences (Socher et al. 2013) and tested on sentences; `python -m bench treebank_phrases` writes
them.

    python -m train fit sst2:bag --data.path sst2/phrases.tsv \
        --data.validation-path sst2/dev.tsv --data.test-path sst2/test.tsv

`sst2:hybrid` is the model of `trec:hybrid` with the recipe of `sst2:bag`, best started from word
vectors (`python -m bench word_vectors --classifier sst2 --seeds 0 --save FILE`).
"""

import dataclasses

from configs.trec import EXPERIMENTS as TREC
from train.data.data_config import TokenizerConfig
from train.data.text_labels import ClassificationDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, SampleConfig
from train.tasks.classification import Classification

SENTENCES = ClassificationDataConfig(
    path="sst2/train.tsv",
    validation_path="sst2/dev.tsv",
    test_path="sst2/test.tsv",
    header=False,
    text_column="0",
    label_column="1",
    max_length=64,
    tokenizer=TokenizerConfig("word", vocab_size=14_000, lowercase=True),
)

_SST2 = dataclasses.replace(
    TREC["trec"],
    name="sst2",
    data=SENTENCES,
    sample=SampleConfig(every=500, prompt="a warm and funny film ."),
)

_BAG = dataclasses.replace(
    _SST2,
    name="sst2-bag",
    model=TREC["bag"].model,
    # Words are left out at random, so that no single one decides (Iyyer et al. 2015, section 2.3).
    task=Classification(pooling="mean", classifier_dropout=0.3, word_dropout=0.3),
    data=dataclasses.replace(
        SENTENCES,
        path="sst2/phrases.tsv",
        tokenizer=TokenizerConfig("word", vocab_size=16_000, lowercase=True),
    ),
    steps=4000,
    evaluation=EvaluationConfig(every=500, num_batches=0),
    checkpoint=CheckpointConfig(every=1000, keep_last=1),
)

_HYBRID = dataclasses.replace(_BAG, name="sst2-hybrid", model=TREC["hybrid"].model)

EXPERIMENTS = {"sst2": _SST2, "bag": _BAG, "hybrid": _HYBRID}

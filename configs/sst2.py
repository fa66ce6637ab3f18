"""SST-2 (Socher et al. 2013): the sentiment of a sentence of a film review.

    python -m train fit sst2 --data.path sst2/train.tsv \
        --data.validation-path sst2/dev.tsv --data.test-path sst2/test.tsv
    python -m train evaluate runs/sst2 --split test

6,920 full sentences (not the phrases of GLUE), with the encoder of `trec`.
"""

import dataclasses

from configs.trec import EXPERIMENTS as TREC
from train.data.data_config import TokenizerConfig
from train.data.example_configs import ClassificationDataConfig
from train.experiment import SampleConfig

EXPERIMENTS = {
    "sst2": dataclasses.replace(
        TREC["trec"],
        name="sst2",
        data=ClassificationDataConfig(
            path="sst2/train.tsv",
            validation_path="sst2/dev.tsv",
            test_path="sst2/test.tsv",
            header=False,
            text_column="0",
            label_column="1",
            max_length=64,
            tokenizer=TokenizerConfig("word", vocab_size=14_000, lowercase=True),
        ),
        sample=SampleConfig(every=500, prompt="a warm and funny film ."),
    )
}

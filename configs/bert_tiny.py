"""A tiny BERT on WikiText-2: predict masked tokens from both sides.

    python -m train fit bert_tiny --data.path wikitext-2/train.txt \
        --data.validation-path wikitext-2/valid.txt

2 layers of width 128, as the smallest of Turc et al. 2019, with a WordPiece vocabulary of 8,192.
"""

import dataclasses

from configs.bert import bert
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from train.tasks.masked_language_modeling import MaskedLanguageModeling
from transformer import Initialization, Precision

EXPERIMENTS = {
    "bert_tiny": Experiment(
        name="bert_tiny",
        task=MaskedLanguageModeling(),
        model=dataclasses.replace(
            bert(2, 128, 2, dropout=0.0, sequence_length=128),
            vocab_size=0,
            num_token_types=0,
            pooler=False,
            precision=Precision(),
            initialization=Initialization(std=0),
        ),
        data=TextDataConfig(
            path="wikitext-2/train.txt",
            validation_path="wikitext-2/valid.txt",
            sequence_length=128,
            document_masking=False,
            tokenizer=TokenizerConfig("wordpiece", vocab_size=8192, lowercase=True),
        ),
        optimizer=Muon(beta2=0.98, weight_decay=0.05),
        schedule=ScheduleConfig("linear", learning_rate=3e-3, warmup_steps=100, min_lr_ratio=0.0),
        steps=2000,
        batch_size=32,
        evaluation=EvaluationConfig(every=250, num_batches=20),
        sample=SampleConfig(every=1000, prompt="the capital of france is [MASK] ."),
        checkpoint=CheckpointConfig(every=500),
    )
}

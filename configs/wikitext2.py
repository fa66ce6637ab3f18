"""WikiText-2 (Merity et al. 2017) by words: 33,278 of them, <unk> and <eos> among them.

    python -m train fit wikitext2 --data.path wikitext-2/train.txt \
        --data.validation-path wikitext-2/valid.txt --data.test-path wikitext-2/test.txt
    python -m train evaluate runs/wikitext2 --split test

A small LLaMA-style model that two cores can train; most of its work is the vocabulary.
"""

from train.data.config import DataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optimizers import Muon
from train.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    Rotary,
    TransformerConfig,
)

_BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=False, position=Rotary()),
    feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False, dropout=0.1),
    norm=NormConfig("rms", epsilon=1e-6),
    dropout=0.1,
)

EXPERIMENTS = {
    "wikitext2": Experiment(
        name="wikitext2",
        model=TransformerConfig(
            width=144,
            layers=4,
            pattern=(_BLOCK,),
            final_norm=NormConfig("rms", epsilon=1e-6),
            dropout=0.1,
            initialization=Initialization(std=0),
        ),
        data=DataConfig(
            path="wikitext-2/train.txt",
            validation_path="wikitext-2/valid.txt",
            test_path="wikitext-2/test.txt",
            sequence_length=128,
            segments=False,
            tokenizer=TokenizerConfig("word", vocab_size=33_278),
        ),
        optimizer=Muon(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(
            "warmup_stable_decay", learning_rate=3e-3, warmup=100, decay=0.6, final=0.0
        ),
        steps=3600,
        batch_size=16,
        log_every=20,
        evaluation=EvaluationConfig(every=250, batches=10),
        sample=SampleConfig(every=1000, prompt="The game", tokens=60, temperature=0.8),
        checkpoint=CheckpointConfig(every=250),
    )
}

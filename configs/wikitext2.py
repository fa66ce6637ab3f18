"""WikiText-2 (Merity et al. 2017) at word level: 33,278 words, including <unk> and <eos>.

    python -m train fit wikitext2 --data.path wikitext-2/train.txt \
        --data.validation-path wikitext-2/valid.txt --data.test-path wikitext-2/test.txt
    python -m train evaluate runs/wikitext2 --split test

A small Llama-style model for two cores. Most of its compute is the output projection.
"""

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    RoPE,
    TransformerConfig,
)

_BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=4, bias=False, position=RoPE()),
    feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False, dropout=0.1),
    norm=NormConfig("rms", epsilon=1e-6),
    residual_dropout=0.1,
)

EXPERIMENTS = {
    "wikitext2": Experiment(
        name="wikitext2",
        model=TransformerConfig(
            d_model=144,
            num_layers=4,
            layer_pattern=(_BLOCK,),
            final_norm=NormConfig("rms", epsilon=1e-6),
            embedding_dropout=0.1,
            initialization=Initialization(std=0),
        ),
        data=TextDataConfig(
            path="wikitext-2/train.txt",
            validation_path="wikitext-2/valid.txt",
            test_path="wikitext-2/test.txt",
            sequence_length=128,
            document_masking=False,
            tokenizer=TokenizerConfig("word", vocab_size=33_278),
        ),
        optimizer=Muon(beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(
            "warmup_stable_decay",
            learning_rate=3e-3,
            warmup_steps=100,
            decay_fraction=0.6,
            min_lr_ratio=0.0,
        ),
        steps=3600,
        batch_size=16,
        log_every=20,
        evaluation=EvaluationConfig(every=250, num_batches=10),
        sample=SampleConfig(every=1000, prompt="The game", max_new_tokens=60, temperature=0.8),
        checkpoint=CheckpointConfig(every=250),
    )
}

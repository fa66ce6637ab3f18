"""A LLaMA-style language model of the text that every Python carries, in minutes on two cores.

    python -m train fit quickstart

The interpreter's own help topics and the source of its library, about 10 MB; one file in ten is
held out whole. Pre-norm, RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases.
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
    mixer=AttentionConfig(heads=6, kv_heads=3, bias=False, position=Rotary()),
    feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
    norm=NormConfig("rms", epsilon=1e-6),
)

EXPERIMENTS = {
    "quickstart": Experiment(
        name="quickstart",
        model=TransformerConfig(
            width=192,
            layers=4,
            pattern=(_BLOCK,),
            final_norm=NormConfig("rms", epsilon=1e-6),
            initialization=Initialization(std=0),
        ),
        data=DataConfig(
            path="python:library",
            validation_fraction=0.12,
            sequence_length=128,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
        ),
        # Three iterations after `aol` learn as much as five after the norm, in an eighth less time.
        optimizer=Muon(beta2=0.95, weight_decay=0.05, iterations=3, preconditioning="aol"),
        schedule=ScheduleConfig(
            "warmup_stable_decay", learning_rate=4e-3, warmup=50, decay=0.5, final=0.0
        ),
        steps=1200,
        batch_size=8,
        evaluation=EvaluationConfig(every=300, batches=20, compressors=True),
        sample=SampleConfig(every=300, prompt="def ", tokens=80),
        checkpoint=CheckpointConfig(every=300),
    )
}

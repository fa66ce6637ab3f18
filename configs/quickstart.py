"""A Llama-style language model of Python's own library, trained in minutes on two cores.

    python -m train fit quickstart

The data are the interpreter's help topics and the source of its library, about 10 MB, with one file
in ten held out. Pre-norm, RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases.
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
    mixer=AttentionConfig(num_heads=6, num_kv_heads=3, bias=False, position=RoPE()),
    feed_forward=FeedForwardConfig(activation="silu", gated=True, bias=False),
    norm=NormConfig("rms", epsilon=1e-6),
)

EXPERIMENTS = {
    "quickstart": Experiment(
        name="quickstart",
        model=TransformerConfig(
            d_model=192,
            num_layers=4,
            layer_pattern=(_BLOCK,),
            final_norm=NormConfig("rms", epsilon=1e-6),
            initialization=Initialization(std=0),
        ),
        data=TextDataConfig(
            path="python:library",
            validation_fraction=0.12,
            sequence_length=128,
            tokenizer=TokenizerConfig("bpe", vocab_size=2048),
        ),
        # 3 iterations with `aol` learn as much as 5 with the norm, in an eighth less time.
        optimizer=Muon(beta2=0.95, weight_decay=0.05, ns_steps=3, preconditioning="aol"),
        schedule=ScheduleConfig(
            "warmup_stable_decay",
            learning_rate=4e-3,
            warmup_steps=50,
            decay_fraction=0.5,
            min_lr_ratio=0.0,
        ),
        steps=1200,
        batch_size=8,
        evaluation=EvaluationConfig(every=300, num_batches=20, compression_baselines=True),
        sample=SampleConfig(every=300, prompt="def ", max_new_tokens=80),
        checkpoint=CheckpointConfig(every=300),
    )
}

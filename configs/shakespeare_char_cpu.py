"""Tiny Shakespeare, by characters, small enough for a CPU.

    python -m train fit shakespeare_char_cpu --data.path input.txt

The text is Karpathy's input.txt (1,115,394 characters), split as usual: the last tenth is held out.
4 layers of 4 heads, 128 wide, windows of 64, 12 to a batch, 900 steps: in less time
to a lower loss than nanoGPT's 2,000.
"""

from train.data.config import DataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optimizers import Muon
from train.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    TransformerConfig,
)

_BLOCK = BlockConfig(
    mixer=AttentionConfig(heads=4, bias=False),
    feed_forward=FeedForwardConfig(activation="gelu", bias=False),
    norm=NormConfig("layer", bias=False),
)

DATA = DataConfig(
    path="tinyshakespeare/input.txt",
    split="tail",
    sequence_length=64,
    segments=False,
    tokenizer=TokenizerConfig("character"),
)

EXPERIMENTS = {
    "shakespeare_char_cpu": Experiment(
        name="shakespeare_char_cpu",
        model=TransformerConfig(
            width=128,
            layers=4,
            pattern=(_BLOCK,),
            position=LearnedPositions(64),
            final_norm=NormConfig("layer", bias=False),
        ),
        data=DATA,
        optimizer=Muon(beta2=0.99),
        schedule=ScheduleConfig("cosine", learning_rate=4e-3, warmup=100),
        steps=900,
        batch_size=12,
        evaluation=EvaluationConfig(every=250, batches=20),
        sample=SampleConfig(every=500, prompt="\n", tokens=200),
        checkpoint=CheckpointConfig(every=500),
    )
}

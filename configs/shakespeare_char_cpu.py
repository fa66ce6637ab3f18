"""Tiny Shakespeare at character level, small enough for a CPU.

    python -m train fit shakespeare_char_cpu --data.path input.txt

The text is Karpathy's input.txt (1,115,394 characters), split as usual: the last tenth is held out.
4 layers of 4 heads, 128 wide, windows of 64, 12 to a batch. The 900 steps take less time than
nanoGPT's 2,000 and reach a lower loss.
"""

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    TransformerConfig,
)

_BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=4, bias=False),
    feed_forward=FeedForwardConfig(activation="gelu", bias=False),
    norm=NormConfig("layer", bias=False),
)

DATA = TextDataConfig(
    path="tinyshakespeare/input.txt",
    split_method="tail",
    sequence_length=64,
    document_masking=False,
    tokenizer=TokenizerConfig("character"),
)

EXPERIMENTS = {
    "shakespeare_char_cpu": Experiment(
        name="shakespeare_char_cpu",
        model=TransformerConfig(
            d_model=128,
            num_layers=4,
            layer_pattern=(_BLOCK,),
            position_embedding=LearnedPositions(64),
            final_norm=NormConfig("layer", bias=False),
        ),
        data=DATA,
        optimizer=Muon(beta2=0.99),
        schedule=ScheduleConfig("cosine", learning_rate=4e-3, warmup_steps=100),
        steps=900,
        batch_size=12,
        evaluation=EvaluationConfig(every=250, num_batches=20),
        sample=SampleConfig(every=500, prompt="\n", max_new_tokens=200),
        checkpoint=CheckpointConfig(every=500),
    )
}

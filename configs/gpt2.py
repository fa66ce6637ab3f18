"""GPT-2 (Radford et al. 2019): its four sizes, on text of your own.

    python -m train fit gpt2:medium --data.path 'corpus/*.jsonl.gz' --workdir runs/gpt2-medium

The vocabulary is GPT-2's own 50,257 byte-level BPE tokens if `--data.tokenizer.kind file
--data.tokenizer.path FOLDER` names the folder of its encoder.json and merges.txt; otherwise one of
that size is learned from the text.
"""

from train.data.config import DataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optimizers import AdamW
from train.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    Precision,
    TransformerConfig,
)
from transformer.config import Remat

VOCABULARY = 50_257
LENGTH = 1024


def gpt2(
    name: str,
    *,
    layers: int,
    width: int,
    heads: int,
    learning_rate: float,
    accumulate: int,
    remat: Remat = "none",
) -> Experiment:
    """Pre-norm, LayerNorm, GELU by tanh, learned positions, biases, tied embeddings."""
    dropout = 0.0  # 0.1 in the paper, whose corpus was read several times
    block = BlockConfig(
        mixer=AttentionConfig(heads=heads, dropout=dropout),
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
        norm=NormConfig("layer", epsilon=1e-5),
        dropout=dropout,
    )
    return Experiment(
        name=name,
        model=TransformerConfig(
            vocab_size=VOCABULARY,
            width=width,
            layers=layers,
            pattern=(block,),
            position=LearnedPositions(LENGTH),
            dropout=dropout,
            precision=Precision.named("bfloat16"),
            remat=remat,
        ),
        data=DataConfig(
            sequence_length=LENGTH,
            segments=False,
            tokenizer=TokenizerConfig("bpe", vocab_size=VOCABULARY),
        ),
        optimizer=AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig("cosine", learning_rate=learning_rate, warmup=2000, final=0.1),
        steps=100_000,
        batch_size=480,
        accumulate=accumulate,
        evaluation=EvaluationConfig(every=1000, batches=10),
        sample=SampleConfig(every=5000),
        checkpoint=CheckpointConfig(every=1000, keep=3),
    )


# About half a million tokens a step, in microbatches that one accelerator of 80 GB can hold by
# `describe`'s estimate; on several, lower `accumulate` as the batch is spread.
EXPERIMENTS = {
    "small": gpt2("gpt2-small", layers=12, width=768, heads=12, learning_rate=6e-4, accumulate=12),
    "medium": gpt2(
        "gpt2-medium", layers=24, width=1024, heads=16, learning_rate=3e-4, accumulate=24
    ),
    "large": gpt2(
        "gpt2-large",
        layers=36,
        width=1280,
        heads=20,
        learning_rate=2.5e-4,
        accumulate=24,
        remat="full",
    ),
    "xl": gpt2(
        "gpt2-xl",
        layers=48,
        width=1600,
        heads=25,
        learning_rate=2e-4,
        accumulate=24,
        remat="full",
    ),
}

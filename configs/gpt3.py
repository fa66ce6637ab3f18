"""GPT-3 (Brown et al. 2020, table 2.1): its eight sizes as printed, on your own text.

    python -m train describe gpt3:175b
    python -m train fit gpt3:small --data.path 'corpus/*.jsonl.gz' --workdir runs/gpt3-small

Two rows are odd, and are kept so: XL has 24 heads of 128 at width 2,048, and 13B has width 5,140
with 40 heads of 128. Attention is full in every layer: the paper's alternate layers are banded.
"""

import dataclasses

from configs.gpt2 import EXPERIMENTS as GPT2
from configs.gpt2 import VOCAB_SIZE
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from transformer import AttentionConfig, LearnedPositions

SEQUENCE_LENGTH = 2048


def gpt3(
    name: str,
    num_layers: int,
    width: int,
    num_heads: int,
    head_width: int,
    *,
    million_tokens: float,
    learning_rate: float,
) -> Experiment:
    """Return GPT-2's layers with GPT-3's sizes, and a cosine schedule over 300 billion tokens."""
    base = GPT2["small"]
    block = dataclasses.replace(
        base.model.layer_pattern[0], mixer=AttentionConfig(num_heads=num_heads, head_dim=head_width)
    )
    batch = round(million_tokens * 1e6 / SEQUENCE_LENGTH / 16) * 16
    return dataclasses.replace(
        base,
        name=f"gpt3-{name}",
        model=dataclasses.replace(
            base.model,
            d_model=width,
            num_layers=num_layers,
            layer_pattern=(block,),
            position_embedding=LearnedPositions(SEQUENCE_LENGTH),
            remat="full",
        ),
        data=TextDataConfig(
            sequence_length=SEQUENCE_LENGTH,
            document_masking=False,
            tokenizer=TokenizerConfig("bpe", vocab_size=VOCAB_SIZE),
        ),
        schedule=ScheduleConfig(
            "cosine",
            learning_rate=learning_rate,
            warmup_steps=round(375e6 / (batch * SEQUENCE_LENGTH)),
            min_lr_ratio=0.1,
        ),
        steps=round(300e9 / (batch * SEQUENCE_LENGTH)),
        batch_size=batch,
        grad_accum_steps=16,
    )


EXPERIMENTS = {
    "small": gpt3("small", 12, 768, 12, 64, million_tokens=0.5, learning_rate=6e-4),
    "medium": gpt3("medium", 24, 1024, 16, 64, million_tokens=0.5, learning_rate=3e-4),
    "large": gpt3("large", 24, 1536, 16, 96, million_tokens=0.5, learning_rate=2.5e-4),
    "xl": gpt3("xl", 24, 2048, 24, 128, million_tokens=1, learning_rate=2e-4),
    "2.7b": gpt3("2.7b", 32, 2560, 32, 80, million_tokens=1, learning_rate=1.6e-4),
    "6.7b": gpt3("6.7b", 32, 4096, 32, 128, million_tokens=2, learning_rate=1.2e-4),
    "13b": gpt3("13b", 40, 5140, 40, 128, million_tokens=2, learning_rate=1e-4),
    "175b": gpt3("175b", 96, 12288, 96, 128, million_tokens=3.2, learning_rate=6e-5),
}

"""Tiny Shakespeare, by characters, for one accelerator.

    python -m train fit shakespeare_char --data.path input.txt

The text is Karpathy's input.txt (1,115,394 characters), split as usual: the last tenth is held out.
6 layers of 6 heads, 384 wide, windows of 256, 64 to a batch, dropout 0.2, 5,000 steps.
"""

import dataclasses

from configs.shakespeare_char_cpu import DATA
from configs.shakespeare_char_cpu import EXPERIMENTS as CPU
from train.experiment import CheckpointConfig, EvaluationConfig
from transformer import AttentionConfig, LearnedPositions, Precision

_SMALL = CPU["shakespeare_char_cpu"]
_BLOCK = dataclasses.replace(
    _SMALL.model.pattern[0],
    mixer=AttentionConfig(heads=6, bias=False, dropout=0.2),
    dropout=0.2,
)

EXPERIMENTS = {
    "shakespeare_char": dataclasses.replace(
        _SMALL,
        name="shakespeare_char",
        model=dataclasses.replace(
            _SMALL.model,
            width=384,
            layers=6,
            pattern=(_BLOCK,),
            position=LearnedPositions(256),
            dropout=0.2,
            precision=Precision.named("bfloat16"),
        ),
        data=dataclasses.replace(DATA, sequence_length=256),
        steps=5000,
        batch_size=64,
        evaluation=EvaluationConfig(every=250, batches=10),
        checkpoint=CheckpointConfig(every=1000),
    )
}

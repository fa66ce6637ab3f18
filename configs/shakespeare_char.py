"""Tiny Shakespeare at character level, for one accelerator.

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
    _SMALL.model.layer_pattern[0],
    mixer=AttentionConfig(num_heads=6, bias=False, dropout=0.2),
    residual_dropout=0.2,
)

EXPERIMENTS = {
    "shakespeare_char": dataclasses.replace(
        _SMALL,
        name="shakespeare_char",
        model=dataclasses.replace(
            _SMALL.model,
            d_model=384,
            num_layers=6,
            layer_pattern=(_BLOCK,),
            position_embedding=LearnedPositions(256),
            embedding_dropout=0.2,
            precision=Precision.parse("bfloat16"),
        ),
        data=dataclasses.replace(DATA, sequence_length=256),
        steps=5000,
        batch_size=64,
        evaluation=EvaluationConfig(every=250, num_batches=10),
        checkpoint=CheckpointConfig(every=1000),
    )
}

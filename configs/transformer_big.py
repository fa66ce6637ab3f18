"""The big transformer of "Attention Is All You Need" (Vaswani et al. 2017, table 3).

    python -m train fit transformer_big --data.path corpus/train --data.validation-path corpus/dev

`transformer_base` with width 1,024, feed-forward 4,096, 16 heads, dropout 0.3, three times the
steps, and the last 20 checkpoints averaged (section 6.1).
"""

import dataclasses

from configs.transformer_base import EXPERIMENTS as BASE
from configs.transformer_base import transformer_model

EXPERIMENTS = {
    "transformer_big": dataclasses.replace(
        BASE["transformer_base"],
        name="transformer_big",
        model=transformer_model(width=1024, hidden=4096, num_heads=16, dropout=0.3),
        steps=300_000,
        evaluation=dataclasses.replace(BASE["transformer_base"].evaluation, average_checkpoints=20),
        checkpoint=dataclasses.replace(BASE["transformer_base"].checkpoint, keep_last=20),
    )
}

"""Continuous inputs: a small Vision Transformer, spectra of sound, and attention along a graph.

    python -m train fit digits
    python -m train fit digits:chirps
    python -m train fit digits:graphs
    python -m train fit digits --data.path mine.npz --data.patch-size 4 --data.length 49

| experiment   | examples                                         | one position is      |
| ------------ | ------------------------------------------------ | -------------------- |
| `digits`     | scikit-learn's handwritten digits, 8 x 8 pixels  | a patch of 2 x 2     |
| `chirps`     | noisy tones that fall, stay or rise (generated)  | the spectrum of 8 ms |
| `graphs`     | graphs with two marked nodes: are they near      | a node               |
| `blind`      | the same graphs without their edges              | a node               |

The model of `graphs` attends only along edges, so that three layers reach nodes three edges away.
`blind` attends to all nodes but is not told the edges: it can only guess.
"""

import dataclasses

from train.data.features import FeatureDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.feature_classification import FeatureClassification
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NoPosition,
    NormConfig,
    TransformerConfig,
)

_BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=4),
    feed_forward=FeedForwardConfig(activation="gelu"),
    norm=NormConfig("layer"),
    residual_dropout=0.1,
)

_DIGITS = Experiment(
    name="digits",
    task=FeatureClassification(),
    model=TransformerConfig(
        d_model=64,
        num_layers=3,
        layer_pattern=(_BLOCK,),
        causal=False,
        position_embedding=LearnedPositions(64),
    ),
    data=FeatureDataConfig("builtin:digits", patch_size=2, length=16, scale=16.0),
    optimizer=AdamW(weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=100),
    steps=1500,
    batch_size=32,
    evaluation=EvaluationConfig(every=250),
    checkpoint=CheckpointConfig(every=500, keep_best=True),
)

_GRAPHS = dataclasses.replace(
    _DIGITS,
    name="graphs",
    model=dataclasses.replace(_DIGITS.model, position_embedding=NoPosition()),
    data=FeatureDataConfig("builtin:graphs", length=12),
)

EXPERIMENTS = {
    "digits": _DIGITS,
    "chirps": dataclasses.replace(
        _DIGITS,
        name="chirps",
        data=FeatureDataConfig("builtin:chirps", frame_length=128, length=15),
        steps=800,
    ),
    "graphs": _GRAPHS,
    "blind": dataclasses.replace(
        _GRAPHS, name="blind", task=FeatureClassification(use_adjacency=False)
    ),
}

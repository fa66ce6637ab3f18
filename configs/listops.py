"""ListOps (Nangia and Bowman 2018): what nested operations on lists of digits come to.

    python -m train fit listops
    python -m train fit listops:performer
    python -m train fit listops:arena_performer

One experiment for each variant of attention, all else equal; nothing has to be downloaded. The
first are of a size for two cores, a few steps a second. `arena_...` are as the Long Range Arena has
them (Tay et al. 2021: 6 layers x 512, 8 heads, 5,000 steps, the first token's vector), for
accelerators; to draw its 100,000 expressions may take some minutes.
"""

import dataclasses
import math
from collections.abc import Sequence

from train.data.listops_config import ListOpsDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optimizers import AdamW
from train.schedules import ScheduleConfig
from train.tasks.config import Classification
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    LinearAttentionConfig,
    LinformerConfig,
    LongformerConfig,
    MixerConfig,
    NormConfig,
    PerformerConfig,
    ReformerConfig,
    RoutingConfig,
    SinusoidalPositions,
    SlidingWindowConfig,
    SparseConfig,
    TopKConfig,
    TransformerConfig,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Of an encoder and its input."""

    layers: int
    width: int
    heads: int
    length: int
    seen: int
    """About how many keys a query looks at, where it does not look at all of them."""
    dropout: float


SMALL = Size(layers=2, width=64, heads=4, length=256, seen=32, dropout=0.0)
ARENA = Size(layers=6, width=512, heads=8, length=2000, seen=256, dropout=0.1)


def mixers(size: Size) -> dict[str, tuple[MixerConfig, ...]]:
    """Every variant of attention that reads both ways: of layers in turn.

    Routing has layers of a window between, as its paper has heads of one (section 4.1): alone it
    learned nothing of ListOps in 400 steps.
    """
    heads, seen, root = size.heads, size.seen, math.isqrt(size.length)
    alone: dict[str, MixerConfig] = {
        "full": AttentionConfig(heads=heads),
        "sliding_window": SlidingWindowConfig(heads=heads, window=seen // 2),
        "longformer": LongformerConfig(heads=heads, window=seen // 2),
        "bigbird": BigBirdConfig(heads=heads, block=seen // 8, span=size.length),
        "sparse": SparseConfig(heads=heads, stride=root),
        "performer": PerformerConfig(heads=heads, features=4 * size.width // heads),
        "linear": LinearAttentionConfig(heads=heads),
        "linformer": LinformerConfig(heads=heads, length=size.length, rank=seen),
        "routing": RoutingConfig(heads=heads, clusters=root, window=seen // 2),
        "top_k": TopKConfig(heads=heads, chosen=seen),
        "reformer": ReformerConfig(heads=heads, buckets=root // 2 * 2, rounds=2, window=seen // 4),
    }
    in_turn: dict[str, tuple[MixerConfig, ...]] = {name: (own,) for name, own in alone.items()}
    return in_turn | {"routing": (alone["sliding_window"], alone["routing"])}


def encoder(in_turn: Sequence[MixerConfig], size: Size) -> TransformerConfig:
    """Layers of those mixers, with positions added to the embeddings, as all variants can have."""
    pattern = tuple(
        BlockConfig(
            mixer=mixer,
            feed_forward=FeedForwardConfig(4 * size.width, activation="gelu"),
            norm=NormConfig("layer"),
            dropout=size.dropout,
        )
        for mixer in in_turn
    )
    return TransformerConfig(
        width=size.width,
        layers=size.layers,
        pattern=pattern,
        position=SinusoidalPositions(),
        embedding_scale=True,
        causal=False,
        dropout=size.dropout,
        initialization=Initialization(std=0, embedding_std=size.width**-0.5),
    )


def variants(base: Experiment, size: Size, prefix: str = "") -> dict[str, Experiment]:
    """The experiment with every variant of attention, by name."""
    return {
        f"{prefix}{name}": dataclasses.replace(
            base, name=f"{base.name}-{name}", model=encoder(in_turn, size)
        )
        for name, in_turn in mixers(size).items()
    }


_SMALL = Experiment(
    name="listops",
    task=Classification(classes=10),
    model=TransformerConfig(causal=False),
    data=ListOpsDataConfig(
        examples=10_000,
        validation_examples=1000,
        test_examples=1000,
        min_length=64,
        max_length=SMALL.length,
        max_depth=6,
        shapes=1,
    ),
    optimizer=AdamW(beta2=0.98, weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup=50, final=0.0),
    steps=300,
    batch_size=16,
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every=100),
)

_ARENA = dataclasses.replace(
    _SMALL,
    name="listops-arena",
    data=ListOpsDataConfig(max_length=ARENA.length, shapes=1),
    schedule=ScheduleConfig("inverse_sqrt", learning_rate=0.05 * 1000**-0.5, warmup=1000),
    steps=5000,
    batch_size=32,
    evaluation=EvaluationConfig(every=500, batches=20),
    checkpoint=CheckpointConfig(every=500),
)

EXPERIMENTS = variants(_SMALL, SMALL) | variants(_ARENA, ARENA, "arena_")

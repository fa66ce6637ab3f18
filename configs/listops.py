"""ListOps (Nangia and Bowman 2018): evaluate nested operations on lists of digits.

    python -m train fit listops
    python -m train fit listops:performer
    python -m train fit listops:arena_performer

One experiment for each attention variant, all else equal. Nothing has to be downloaded. The first
group has a size for two cores. `arena_...` has the settings of the Long Range Arena (Tay et al.
2021: 6 layers of width 512, 8 heads, 5,000 steps, pooling by the first token), for accelerators;
generating its 100,000 expressions takes some minutes.
"""

import dataclasses
import math
from collections.abc import Sequence

from train.data.listops import ListOpsDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.classification import Classification
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
    RoutingAttentionConfig,
    SinusoidalPositions,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
    TransformerConfig,
)


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Size of an encoder and its input."""

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    keys_per_query: int
    """Approximate number of keys that a query attends to in sparse variants."""
    dropout: float


SMALL = ModelSize(
    num_layers=2, width=64, num_heads=4, sequence_length=256, keys_per_query=32, dropout=0.0
)
ARENA = ModelSize(
    num_layers=6, width=512, num_heads=8, sequence_length=2000, keys_per_query=256, dropout=0.1
)


def attention_variants(size: ModelSize) -> dict[str, tuple[MixerConfig, ...]]:
    """Return the layer pattern of every bidirectional attention variant, by name.

    Routing attention alternates with sliding-window layers, since its paper combines the two in the
    heads of a layer (section 4.1). Alone it did not learn ListOps in 400 steps.
    """
    heads, keys, root = size.num_heads, size.keys_per_query, math.isqrt(size.sequence_length)
    single_layer: dict[str, MixerConfig] = {
        "full": AttentionConfig(num_heads=heads),
        "sliding_window": SlidingWindowConfig(num_heads=heads, window=keys // 2),
        "longformer": LongformerConfig(num_heads=heads, one_sided_window=keys // 2),
        "bigbird": BigBirdConfig(
            num_heads=heads, block_size=keys // 8, random_block_span=size.sequence_length
        ),
        "sparse": SparseTransformerConfig(num_heads=heads, stride=root),
        "performer": PerformerConfig(num_heads=heads, num_features=4 * size.width // heads),
        "linear": LinearAttentionConfig(num_heads=heads),
        "linformer": LinformerConfig(num_heads=heads, max_length=size.sequence_length, rank=keys),
        "routing": RoutingAttentionConfig(num_heads=heads, num_clusters=root, window=keys // 2),
        "top_k": TopKConfig(num_heads=heads, keys_per_query=keys),
        "reformer": ReformerConfig(
            num_heads=heads, num_buckets=root // 2 * 2, num_hashes=2, window=keys // 4
        ),
    }
    patterns: dict[str, tuple[MixerConfig, ...]] = {
        name: (mixer,) for name, mixer in single_layer.items()
    }
    return patterns | {"routing": (single_layer["sliding_window"], single_layer["routing"])}


def encoder(mixers: Sequence[MixerConfig], size: ModelSize) -> TransformerConfig:
    """Return an encoder with this layer pattern and sinusoidal position embeddings."""
    pattern = tuple(
        BlockConfig(
            mixer=mixer,
            feed_forward=FeedForwardConfig(4 * size.width, activation="gelu"),
            norm=NormConfig("layer"),
            residual_dropout=size.dropout,
        )
        for mixer in mixers
    )
    return TransformerConfig(
        d_model=size.width,
        num_layers=size.num_layers,
        layer_pattern=pattern,
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        causal=False,
        embedding_dropout=size.dropout,
        initialization=Initialization(std=0, embedding_std=size.width**-0.5),
    )


def variant_experiments(
    base: Experiment, size: ModelSize, prefix: str = ""
) -> dict[str, Experiment]:
    """Return the experiment with each attention variant, by name."""
    return {
        f"{prefix}{name}": dataclasses.replace(
            base, name=f"{base.name}-{name}", model=encoder(mixers, size)
        )
        for name, mixers in attention_variants(size).items()
    }


_SMALL = Experiment(
    name="listops",
    task=Classification(num_labels=10),
    model=TransformerConfig(causal=False),
    data=ListOpsDataConfig(
        train_examples=10_000,
        validation_examples=1000,
        test_examples=1000,
        min_length=64,
        max_length=SMALL.sequence_length,
        max_depth=6,
        max_buckets=1,
    ),
    optimizer=AdamW(beta2=0.98, weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=50, min_lr_ratio=0.0),
    steps=300,
    batch_size=16,
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every=100),
)

_ARENA = dataclasses.replace(
    _SMALL,
    name="listops-arena",
    data=ListOpsDataConfig(max_length=ARENA.sequence_length, max_buckets=1),
    schedule=ScheduleConfig("inverse_sqrt", learning_rate=0.05 * 1000**-0.5, warmup_steps=1000),
    steps=5000,
    batch_size=32,
    evaluation=EvaluationConfig(every=500, num_batches=20),
    checkpoint=CheckpointConfig(every=500),
)

EXPERIMENTS = variant_experiments(_SMALL, SMALL) | variant_experiments(_ARENA, ARENA, "arena_")

# As `python -m train configs` lists them, without running this file.
NAMES = (
    "full",
    "sliding_window",
    "longformer",
    "bigbird",
    "sparse",
    "performer",
    "linear",
    "linformer",
    "routing",
    "top_k",
    "reformer",
    "arena_full",
    "arena_sliding_window",
    "arena_longformer",
    "arena_bigbird",
    "arena_sparse",
    "arena_performer",
    "arena_linear",
    "arena_linformer",
    "arena_routing",
    "arena_top_k",
    "arena_reformer",
)

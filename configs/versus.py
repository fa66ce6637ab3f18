"""Comparison of transformer recipes with equal parameters, data and steps.

    python -m train fit versus:transformer
    python -m train fit versus:transformer_plus_plus

| experiment              | norm           | feed-forward | positions  | biases |
| ----------------------- | -------------- | ------------ | ---------- | ------ |
| `transformer`           | post LayerNorm | ReLU         | sinusoidal | yes    |
| `gpt`                   | pre LayerNorm  | GELU         | learned    | yes    |
| `transformer_plus_plus` | pre RMSNorm    | SwiGLU       | rotary     | no     |
| `primer`                | pre LayerNorm  | squared ReLU | learned    | some   |

`transformer_pre_norm`, `transformer_rms_norm`, `transformer_swiglu`, `transformer_rope` and
`transformer_no_biases` are `transformer` with that one change towards `transformer_plus_plus`.

`primer` (So et al. 2021) also has a convolution after each head's query, key and value.

All are decoder-only language models, trained on the source of Python's standard library. Their
parameter counts are within 1% of each other.
"""

import dataclasses
from typing import Any

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    LearnedPositions,
    NoPosition,
    NormConfig,
    PrimerConfig,
    RoPE,
    SinusoidalPositions,
    TransformerConfig,
)

WIDTH, NUM_HEADS, SEQUENCE_LENGTH, VOCAB_SIZE = 256, 8, 128, 4096

_BY_FAN_IN = Initialization(std=0, embedding_std=WIDTH**-0.5, depth_scaled=False)
"""First values of the recipes of 2017 and of today. The deviation 0.02 of GPT-2 is close to this at
its widths and much too small at those of a CPU: narrow models hardly attend for the first hundreds
of steps, and would be compared by that."""

_TRANSFORMER = TransformerConfig(
    d_model=WIDTH,
    num_layers=6,
    layer_pattern=(
        BlockConfig(
            mixer=AttentionConfig(num_heads=NUM_HEADS),
            feed_forward=FeedForwardConfig(activation="relu"),
            norm=NormConfig("layer"),
            norm_placement="post",
        ),
    ),
    position_embedding=SinusoidalPositions(),
    scale_embeddings=True,
    final_norm=None,
    initialization=_BY_FAN_IN,  # embeddings are of unit size once they are scaled by sqrt(D)
)

_GPT = TransformerConfig(
    d_model=WIDTH,
    num_layers=6,
    layer_pattern=(
        BlockConfig(
            mixer=AttentionConfig(num_heads=NUM_HEADS),
            feed_forward=FeedForwardConfig(activation="gelu_tanh"),
            norm=NormConfig("layer"),
        ),
    ),
    position_embedding=LearnedPositions(SEQUENCE_LENGTH),
)

_PLUS_PLUS = TransformerConfig(
    d_model=WIDTH,
    num_layers=6,
    layer_pattern=(
        BlockConfig(
            mixer=AttentionConfig(num_heads=NUM_HEADS, bias=False, position=RoPE()),
            feed_forward=FeedForwardConfig(688, activation="silu", gated=True, bias=False),
            norm=NormConfig("rms", epsilon=1e-6),
        ),
    ),
    final_norm=NormConfig("rms", epsilon=1e-6),
    initialization=_BY_FAN_IN,
)

_PRIMER = dataclasses.replace(
    _GPT,
    layer_pattern=(
        dataclasses.replace(
            _GPT.layer_pattern[0],
            mixer=PrimerConfig(num_heads=NUM_HEADS),
            feed_forward=FeedForwardConfig(activation="squared_relu"),
        ),
    ),
)

_COMMON = Experiment(
    data=TextDataConfig(
        path="python:library",
        validation_fraction=0.12,
        sequence_length=SEQUENCE_LENGTH,
        tokenizer=TokenizerConfig("bpe", vocab_size=VOCAB_SIZE),
    ),
    optimizer=AdamW(beta2=0.98, weight_decay=0.1),
    schedule=ScheduleConfig("cosine", learning_rate=1e-3, warmup_steps=200),
    steps=2000,
    batch_size=16,
    evaluation=EvaluationConfig(every=500, num_batches=20),
    sample=SampleConfig(every=1000, prompt="def ", max_new_tokens=80),
    checkpoint=CheckpointConfig(every=500),
)


def comparison_experiment(name: str, model: TransformerConfig) -> Experiment:
    """Return the experiment of a model, with the common data, optimizer and steps."""
    return dataclasses.replace(_COMMON, name=f"versus-{name}", model=model)


_BLOCK, _RMS = _TRANSFORMER.layer_pattern[0], NormConfig("rms", epsilon=1e-6)


def _with_block(**changes: Any) -> TransformerConfig:
    block = dataclasses.replace(_BLOCK, **changes)
    return dataclasses.replace(_TRANSFORMER, layer_pattern=(block,))


CHANGES = {
    "transformer_pre_norm": dataclasses.replace(
        _with_block(norm_placement="pre"), final_norm=NormConfig("layer")
    ),
    "transformer_rms_norm": _with_block(norm=_RMS),
    "transformer_swiglu": _with_block(
        feed_forward=FeedForwardConfig(688, activation="silu", gated=True)
    ),
    "transformer_rope": dataclasses.replace(
        _with_block(mixer=AttentionConfig(num_heads=NUM_HEADS, position=RoPE())),
        position_embedding=NoPosition(),
    ),
    "transformer_no_biases": _with_block(
        mixer=AttentionConfig(num_heads=NUM_HEADS, bias=False),
        feed_forward=FeedForwardConfig(activation="relu", bias=False),
        norm=NormConfig("layer", bias=False),
    ),
}
"""`transformer` with one change at a time."""

EXPERIMENTS = {
    "transformer": comparison_experiment("transformer", _TRANSFORMER),
    "gpt": comparison_experiment("gpt", _GPT),
    "transformer_plus_plus": comparison_experiment("transformer_plus_plus", _PLUS_PLUS),
    "primer": comparison_experiment("primer", _PRIMER),
    **{name: comparison_experiment(name, model) for name, model in CHANGES.items()},
}

# As `python -m train configs` lists them, without running this file.
NAMES = (
    "transformer",
    "gpt",
    "transformer_plus_plus",
    "primer",
    "transformer_pre_norm",
    "transformer_rms_norm",
    "transformer_swiglu",
    "transformer_rope",
    "transformer_no_biases",
)

"""BERT (Devlin et al. 2019): masked language modelling on text of your own.

    python -m train fit bert:base-mlm --data.path 'corpus/*.txt' --workdir runs/bert
    python -m train describe bert:large

Post-norm, LayerNorm, exact GELU, learned positions. `base` and `large` are the published models to
the last parameter: for their sizes, and for published weights. They have two token types and a
pooler, which the published training had sentence pairs for. Masked words alone train neither, so
`base-mlm` and `large-mlm`, to be trained from scratch, do without. The vocabulary is BERT's own if
`--data.tokenizer.kind file --data.tokenizer.path vocab.txt` names it; otherwise one of that size is
learned.
"""

import dataclasses

from train.data.config import DataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optimizers import AdamW
from train.schedules import ScheduleConfig
from train.tasks.config import MaskedLanguageModelling
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    LearnedPositions,
    NormConfig,
    Precision,
    TransformerConfig,
)

WORDS, LENGTH = 30_522, 512


def bert(
    layers: int, width: int, heads: int, *, dropout: float = 0.1, length: int = LENGTH
) -> TransformerConfig:
    """A model of the family."""
    norm = NormConfig("layer", epsilon=1e-12)
    block = BlockConfig(
        mixer=AttentionConfig(heads=heads, dropout=dropout),
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm=norm,
        placement="post",
        dropout=dropout,
    )
    return TransformerConfig(
        vocab_size=WORDS,
        width=width,
        layers=layers,
        pattern=(block,),
        position=LearnedPositions(length),
        embedding_norm=norm,
        token_types=2,
        causal=False,
        pooler=True,
        final_norm=None,
        dropout=dropout,
        precision=Precision.named("bfloat16"),
        initialization=Initialization(depth_scaled=False),
    )


def experiment(name: str, model: TransformerConfig) -> Experiment:
    """A million steps of 256 windows, as published."""
    return Experiment(
        name=f"bert-{name}",
        task=MaskedLanguageModelling(),
        model=model,
        data=DataConfig(
            sequence_length=LENGTH, tokenizer=TokenizerConfig("wordpiece", vocab_size=WORDS)
        ),
        optimizer=AdamW(beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.01, clip=1),
        schedule=ScheduleConfig("linear", learning_rate=1e-4, warmup=10_000, final=0.0),
        steps=1_000_000,
        batch_size=256,
        accumulate=8,
        evaluation=EvaluationConfig(every=1000, batches=10),
        checkpoint=CheckpointConfig(every=1000, keep=3),
    )


def trained_by_words(model: TransformerConfig) -> TransformerConfig:
    """Return the model without the parameters that masked words do not train."""
    return dataclasses.replace(model, token_types=0, pooler=False)


BASE, LARGE = bert(12, 768, 12), bert(24, 1024, 16)

EXPERIMENTS = {
    "base": experiment("base", BASE),
    "large": experiment("large", LARGE),
    "base-mlm": experiment("base-mlm", trained_by_words(BASE)),
    "large-mlm": experiment("large-mlm", trained_by_words(LARGE)),
}

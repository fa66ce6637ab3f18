"""BERT (Devlin et al. 2019): masked language modeling on text of your own.

    python -m train fit bert:base-mlm --data.path 'corpus/*.txt' --workdir runs/bert
    python -m train describe bert:large

Post-norm, LayerNorm, exact GELU, learned positions. `base` and `large` have exactly the published
parameters, so that published weights fit. They include two token types and a pooler, which the
published training used for sentence pairs. Masked language modeling trains neither, so `base-mlm`
and `large-mlm`, for training from scratch, leave them out. The vocabulary is BERT's own if
`--data.tokenizer.kind file --data.tokenizer.path vocab.txt` names it; otherwise one of that size is
learned.
"""

import dataclasses

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.tasks.masked_language_modeling import MaskedLanguageModeling
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

VOCAB_SIZE, SEQUENCE_LENGTH = 30_522, 512


def bert(
    num_layers: int,
    width: int,
    num_heads: int,
    *,
    dropout: float = 0.1,
    sequence_length: int = SEQUENCE_LENGTH,
) -> TransformerConfig:
    """Return a BERT model."""
    norm = NormConfig("layer", epsilon=1e-12)
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=num_heads, dropout=dropout),
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm=norm,
        norm_placement="post",
        residual_dropout=dropout,
    )
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=width,
        num_layers=num_layers,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(sequence_length),
        embedding_norm=norm,
        num_token_types=2,
        causal=False,
        pooler=True,
        final_norm=None,
        embedding_dropout=dropout,
        precision=Precision.parse("bfloat16"),
        initialization=Initialization(depth_scaled=False),
    )


def make_experiment(name: str, model: TransformerConfig) -> Experiment:
    """Return the published training: a million steps of 256 windows."""
    return Experiment(
        name=f"bert-{name}",
        task=MaskedLanguageModeling(),
        model=model,
        data=TextDataConfig(
            sequence_length=SEQUENCE_LENGTH,
            tokenizer=TokenizerConfig("wordpiece", vocab_size=VOCAB_SIZE),
        ),
        optimizer=AdamW(beta1=0.9, beta2=0.999, epsilon=1e-6, weight_decay=0.01, max_grad_norm=1),
        schedule=ScheduleConfig(
            "linear", learning_rate=1e-4, warmup_steps=10_000, min_lr_ratio=0.0
        ),
        steps=1_000_000,
        batch_size=256,
        grad_accum_steps=8,
        evaluation=EvaluationConfig(every=1000, num_batches=10),
        checkpoint=CheckpointConfig(every=1000, keep_last=3),
    )


def without_pooler(model: TransformerConfig) -> TransformerConfig:
    """Return the model without the parameters that masked language modeling does not train."""
    return dataclasses.replace(model, num_token_types=0, pooler=False)


BASE, LARGE = bert(12, 768, 12), bert(24, 1024, 16)

EXPERIMENTS = {
    "base": make_experiment("base", BASE),
    "large": make_experiment("large", LARGE),
    "base-mlm": make_experiment("base-mlm", without_pooler(BASE)),
    "large-mlm": make_experiment("large-mlm", without_pooler(LARGE)),
}

"""GPT-2 (Radford et al. 2019): its four sizes, on your own text.

    python -m train fit gpt2:medium --data.path 'corpus/*.jsonl.gz' --workdir runs/gpt2-medium

The vocabulary is GPT-2's own 50,257 byte-level BPE tokens if `--data.tokenizer.kind file
--data.tokenizer.path FOLDER` names the folder of its encoder.json and merges.txt; otherwise one of
that size is learned from the text.
"""

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    Precision,
    TransformerConfig,
)
from transformer.models.stack import RematPolicy

VOCAB_SIZE = 50_257
SEQUENCE_LENGTH = 1024


def gpt2(
    name: str,
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    learning_rate: float,
    grad_accum_steps: int,
    remat: RematPolicy = "none",
) -> Experiment:
    """Return pre-norm, LayerNorm, tanh GELU, learned positions, biases and tied embeddings."""
    dropout = 0.0  # 0.1 in the paper, which trained several epochs
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=num_heads, dropout=dropout),
        feed_forward=FeedForwardConfig(activation="gelu_tanh"),
        norm=NormConfig("layer", epsilon=1e-5),
        residual_dropout=dropout,
    )
    return Experiment(
        name=name,
        model=TransformerConfig(
            vocab_size=VOCAB_SIZE,
            d_model=width,
            num_layers=num_layers,
            layer_pattern=(block,),
            position_embedding=LearnedPositions(SEQUENCE_LENGTH),
            embedding_dropout=dropout,
            precision=Precision.parse("bfloat16"),
            remat=remat,
        ),
        data=TextDataConfig(
            sequence_length=SEQUENCE_LENGTH,
            document_masking=False,
            tokenizer=TokenizerConfig("bpe", vocab_size=VOCAB_SIZE),
        ),
        optimizer=AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=1.0),
        schedule=ScheduleConfig(
            "cosine", learning_rate=learning_rate, warmup_steps=2000, min_lr_ratio=0.1
        ),
        steps=100_000,
        batch_size=480,
        grad_accum_steps=grad_accum_steps,
        evaluation=EvaluationConfig(every=1000, num_batches=10),
        sample=SampleConfig(every=5000),
        checkpoint=CheckpointConfig(every=1000, keep_last=3),
    )


# About half a million tokens a step, in microbatches that one accelerator of 80 GB can hold by
# `describe`'s estimate; on several, lower `grad_accum_steps` as the batch is spread.
EXPERIMENTS = {
    "small": gpt2(
        "gpt2-small",
        num_layers=12,
        width=768,
        num_heads=12,
        learning_rate=6e-4,
        grad_accum_steps=12,
    ),
    "medium": gpt2(
        "gpt2-medium",
        num_layers=24,
        width=1024,
        num_heads=16,
        learning_rate=3e-4,
        grad_accum_steps=24,
    ),
    "large": gpt2(
        "gpt2-large",
        num_layers=36,
        width=1280,
        num_heads=20,
        learning_rate=2.5e-4,
        grad_accum_steps=24,
        remat="full",
    ),
    "xl": gpt2(
        "gpt2-xl",
        num_layers=48,
        width=1600,
        num_heads=25,
        learning_rate=2e-4,
        grad_accum_steps=24,
        remat="full",
    ),
}

"""The base transformer of "Attention Is All You Need" (Vaswani et al. 2017, table 3).

    python -m train fit transformer_base --data.path corpus/train --data.validation-path corpus/dev

6 + 6 layers, width 512, feed-forward 2,048, 8 heads of 64; post-norm, ReLU, sinusoidal positions,
one table for both languages and the output, scaled by sqrt(D). No attention biases and no norm
after the last layer, as in the authors' own code.
"""

import dataclasses

from train.data.bitext import BitextDataConfig
from train.data.data_config import TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.elementwise import Adam
from train.optim.schedules import ScheduleConfig
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    Precision,
    SinusoidalPositions,
    TransformerConfig,
)

VOCAB_SIZE = 37_000


def transformer_model(
    *,
    num_layers: int = 6,
    width: int = 512,
    hidden: int = 2048,
    num_heads: int = 8,
    dropout: float = 0.1,
    vocab_size: int = VOCAB_SIZE,
) -> TransformerConfig:
    """Return a model of the paper; encoder and decoder have the same sizes."""
    attention = AttentionConfig(num_heads=num_heads, bias=False)
    block = BlockConfig(
        mixer=attention,
        feed_forward=FeedForwardConfig(hidden, activation="relu"),
        norm=NormConfig("layer", epsilon=1e-6),
        norm_placement="post",
        residual_dropout=dropout,
    )
    return TransformerConfig(
        vocab_size=vocab_size,
        d_model=width,
        num_layers=num_layers,
        layer_pattern=(dataclasses.replace(block, cross_attention=attention),),
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        encoder=EncoderConfig(num_layers=num_layers, layer_pattern=(block,), final_norm=None),
        final_norm=None,
        embedding_dropout=dropout,
        precision=Precision.parse("bfloat16"),
        # Fan-in for matrices; embeddings are of unit size once they are multiplied by sqrt(D).
        initialization=Initialization(std=0, embedding_std=width**-0.5, depth_scaled=False),
    )


EXPERIMENTS = {
    "transformer_base": Experiment(
        name="transformer_base",
        task=Translation(label_smoothing=0.1, num_beams=4, length_penalty=0.6),
        model=transformer_model(),
        data=BitextDataConfig(
            batch_tokens=25_000, tokenizer=TokenizerConfig("bpe", vocab_size=VOCAB_SIZE)
        ),
        optimizer=Adam(beta1=0.9, beta2=0.98, epsilon=1e-9, max_grad_norm=0.0),
        schedule=ScheduleConfig("inverse_sqrt", learning_rate=0.0, warmup_steps=4000),
        steps=100_000,
        batch_size=0,  # as many as data.batch_tokens allows
        evaluation=EvaluationConfig(every=1000, num_batches=20, average_checkpoints=5),
        checkpoint=CheckpointConfig(every=1000, keep_last=5),
    )
}

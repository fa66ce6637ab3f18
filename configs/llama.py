"""Llama 1, 2 and 3 (Touvron et al. 2023a, 2023b; Grattafiori et al. 2024), on your own text.

    python -m train describe llama:3-8b
    python -m train fit llama:3.2-1b --data.path 'corpus/*.jsonl.gz' --workdir runs/llama

Pre-norm, RMSNorm, SwiGLU, rotary positions, no biases. The vocabulary has the published size: one
is learned from the text unless `--data.tokenizer.kind file --data.tokenizer.path FILE` names one.
"""

from typing import Any

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    Precision,
    RoPE,
    TransformerConfig,
)
from transformer.attention.rope import Llama3Scaling


def llama(
    num_layers: int,
    width: int,
    num_heads: int,
    hidden: int,
    *,
    num_kv_heads: int = 0,
    vocab_size: int = 32_000,
    tied: bool = False,
    rotary: RoPE = RoPE(),  # noqa: B008
    epsilon: float = 1e-5,
) -> TransformerConfig:
    """Return a Llama model."""
    norm = NormConfig("rms", epsilon=epsilon)
    block = BlockConfig(
        mixer=AttentionConfig(
            num_heads=num_heads, num_kv_heads=num_kv_heads, bias=False, position=rotary
        ),
        feed_forward=FeedForwardConfig(d_ff=hidden, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    return TransformerConfig(
        vocab_size=vocab_size,
        d_model=width,
        num_layers=num_layers,
        layer_pattern=(block,),
        tie_embeddings=tied,
        final_norm=norm,
        precision=Precision.parse("bfloat16"),
        remat="full",
    )


def make_experiment(
    name: str, model: TransformerConfig, *, sequence_length: int, learning_rate: float
) -> Experiment:
    """Return the family's training recipe: about four million tokens per step."""
    batch = 4 * 2**20 // sequence_length
    return Experiment(
        name=f"llama-{name}",
        model=model,
        data=TextDataConfig(
            sequence_length=sequence_length,
            tokenizer=TokenizerConfig("bpe", vocab_size=model.vocab_size),
        ),
        optimizer=AdamW(beta1=0.9, beta2=0.95, weight_decay=0.1, max_grad_norm=1.0),
        schedule=ScheduleConfig(
            "cosine", learning_rate=learning_rate, warmup_steps=2000, min_lr_ratio=0.1
        ),
        steps=250_000,
        batch_size=batch,
        grad_accum_steps=16,
        evaluation=EvaluationConfig(every=1000, num_batches=10),
        sample=SampleConfig(every=5000),
        checkpoint=CheckpointConfig(every=1000, keep_last=3),
    )


_LLAMA3: dict[str, Any] = dict(vocab_size=128_256, num_kv_heads=8, rotary=RoPE(theta=500_000.0))
# 8,192 positions extended to 131,072, as in Llama 3.1 and later.
_LONG = RoPE(theta=500_000.0, scaling=Llama3Scaling(factor=8.0))
_SMALL: dict[str, Any] = dict(
    _LLAMA3, tied=True, rotary=RoPE(theta=500_000.0, scaling=Llama3Scaling(factor=32.0))
)

_MODELS = {
    "1-7b": (llama(32, 4096, 32, 11_008, epsilon=1e-6), 2048, 3e-4),
    "1-13b": (llama(40, 5120, 40, 13_824, epsilon=1e-6), 2048, 3e-4),
    "1-33b": (llama(60, 6656, 52, 17_920, epsilon=1e-6), 2048, 1.5e-4),
    "1-65b": (llama(80, 8192, 64, 22_016), 2048, 1.5e-4),
    "2-7b": (llama(32, 4096, 32, 11_008), 4096, 3e-4),
    "2-13b": (llama(40, 5120, 40, 13_824), 4096, 3e-4),
    "2-70b": (llama(80, 8192, 64, 28_672, num_kv_heads=8), 4096, 1.5e-4),
    "3-8b": (llama(32, 4096, 32, 14_336, **_LLAMA3), 8192, 3e-4),
    "3-70b": (llama(80, 8192, 64, 28_672, **_LLAMA3), 8192, 1.5e-4),
    "3.1-8b": (llama(32, 4096, 32, 14_336, **dict(_LLAMA3, rotary=_LONG)), 8192, 3e-4),
    "3.1-70b": (llama(80, 8192, 64, 28_672, **dict(_LLAMA3, rotary=_LONG)), 8192, 1.5e-4),
    "3.1-405b": (llama(126, 16_384, 128, 53_248, **dict(_LLAMA3, rotary=_LONG)), 8192, 8e-5),
    "3.2-1b": (llama(16, 2048, 32, 8192, **_SMALL), 8192, 3e-4),
    "3.2-3b": (llama(28, 3072, 24, 8192, **_SMALL), 8192, 3e-4),
}

EXPERIMENTS = {
    name: make_experiment(name, model, sequence_length=length, learning_rate=rate)
    for name, (model, length, rate) in _MODELS.items()
}

# As `python -m train configs` lists them, without running this file.
NAMES = (
    "1-7b",
    "1-13b",
    "1-33b",
    "1-65b",
    "2-7b",
    "2-13b",
    "2-70b",
    "3-8b",
    "3-70b",
    "3.1-8b",
    "3.1-70b",
    "3.1-405b",
    "3.2-1b",
    "3.2-3b",
)

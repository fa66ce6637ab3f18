"""Contender ours: an experiment and its engine, as ``fit`` builds them.

Only the settings that define the training are changed.
"""

import itertools
from typing import Any

import flax
import jax
import numpy as np

from bench.peers.jax_memory import peak_bytes
from bench.protocol import Work, serve
from train.assembly import make_engine
from train.data.data_config import TextDataConfig
from train.experiment import Experiment
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.layers.activations import ActivationKind
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import NO_POSITION, LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.parameter_counts import count_parameters
from transformer.precision import Precision

ACTIVATIONS: dict[str, ActivationKind] = {"erf": "gelu", "tanh": "gelu_tanh"}


def experiment_of(settings: dict[str, Any]) -> Experiment:
    """Return the model in the requested shape, as GPT-2 or as Llama lay it out."""
    is_llama = settings.get("family") == "llama"
    rms = NormConfig("rms")
    if is_llama:
        block = BlockConfig(
            mixer=AttentionConfig(num_heads=settings["heads"], bias=False, position=RoPE()),
            feed_forward=FeedForwardConfig(
                d_ff=settings["width"] * 11 // 4, activation="silu", gated=True, bias=False
            ),
            norm=rms,
        )
    else:
        block = BlockConfig(
            mixer=AttentionConfig(num_heads=settings["heads"]),
            feed_forward=FeedForwardConfig(activation=ACTIVATIONS[settings["gelu"]]),
        )
    beta1, beta2 = settings["betas"]
    return Experiment(
        model=TransformerConfig(
            vocab_size=settings["vocabulary"],
            d_model=settings["width"],
            num_layers=settings["layers"],
            layer_pattern=(block,),
            position_embedding=NO_POSITION if is_llama else LearnedPositions(settings["context"]),
            tie_embeddings=not is_llama,
            final_norm=rms if is_llama else NormConfig(),
            precision=Precision.parse(settings["precision"]),
        ),
        data=TextDataConfig(sequence_length=settings["context"], document_masking=False),
        optimizer=AdamW(
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            max_grad_norm=settings["clip"],
        ),
        schedule=ScheduleConfig("constant", settings["learning_rate"], warmup_steps=0),
        batch_size=settings["batch"],
    )


def random_rows(
    generator: np.random.Generator, settings: dict[str, Any], first: int
) -> dict[str, np.ndarray]:
    """Return a batch of random tokens in the form of the data module; ``first`` is its example."""
    batch, context = settings["batch"], settings["context"]
    tokens = generator.integers(settings["vocabulary"], size=(batch, context + 1), dtype=np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((batch, context), np.float32),
        "examples": np.arange(first, first + batch, dtype=np.uint32),
    }


def build(settings: dict[str, Any]) -> Work:
    """Build the experiment's engine and state; a step takes random tokens."""
    engine = make_engine(experiment_of(settings), local_hardware())
    state = engine.init()
    parameters = count_parameters(engine.model).total
    generator, examples = np.random.default_rng(0), itertools.count(step=settings["batch"])

    def step() -> jax.Array:
        nonlocal state
        batch = engine.put_batch(random_rows(generator, settings, next(examples)))
        state, metrics = engine.step(state, batch)
        return metrics["loss"]

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            step()
        loss = float(step())
        jax.block_until_ready(state)
        return loss

    versions = {"jax": jax.__version__, "flax": flax.__version__}
    return Work(run, versions, {"parameters": parameters}, peak_bytes)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    serve(build)

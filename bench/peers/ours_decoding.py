"""Contender ours, decoding: ``transformer.generate``."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bench.peers.jax_memory import peak_bytes
from bench.protocol import Work, serve
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer.attention.full import AttentionConfig
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models import unstacked
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel
from transformer.parameter_counts import count_parameters
from transformer.precision import Precision


def build(settings: dict[str, Any]) -> Work:
    """Build GPT-2 in the requested shape with random weights; a step continues new prompts."""
    config = TransformerConfig(
        vocab_size=settings["vocabulary"],
        d_model=settings["width"],
        num_layers=settings["layers"],
        layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=settings["heads"])),),
        position_embedding=LearnedPositions(settings["context"]),
        precision=Precision(parameters=settings["precision"], compute=settings["precision"]),
    )
    if settings.get("stacked"):
        unstacked.free_bytes = lambda device: 0  # as on a device that has no room for copies
    model = LanguageModel(config, local_hardware())
    token = jnp.zeros((1, 1), jnp.int32)
    params = jax.block_until_ready(jax.jit(model.init)(jax.random.key(0), token)["params"])
    generator = np.random.default_rng(0)

    def run(steps: int) -> None:
        for _ in range(steps):
            size = (settings["batch"], settings["prompt"])
            prompts = list(generator.integers(settings["vocabulary"], size=size))
            count = settings["new_tokens"]
            greedy = SamplingConfig(temperature=0)
            made = generate(model, params, prompts, max_new_tokens=count, sampling=greedy)
            assert all(len(tokens) == count for tokens in made.tokens)

    versions = {"jax": jax.__version__, "flax": flax.__version__}
    return Work(run, versions, {"parameters": count_parameters(model).total}, peak_bytes)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    serve(build)

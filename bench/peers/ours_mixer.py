"""Contender ours, one mixer: `longformer` or `bigbird` over one row of tokens, forward."""

import math
from typing import Any

import flax
import jax
import jax.numpy as jnp

from bench.protocol import Work, peak_resident_bytes, resident_bytes, serve
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer import BigBirdConfig, Initialization, LongformerConfig, Mask, Precision
from transformer.attention.mixer import MixerConfig, MixerInputs, mixer_class
from transformer.model_context import ModelContext


def config_of(settings: dict[str, Any]) -> MixerConfig:
    """Return the requested mixer with defaults otherwise."""
    heads = settings["heads"]
    if settings["mixer"] == "longformer":
        return LongformerConfig(num_heads=heads, one_sided_window=settings["window"])
    return BigBirdConfig(
        num_heads=heads, block_size=settings["block"], random_block_span=settings["length"]
    )


def build(settings: dict[str, Any]) -> Work:
    """Compile the mixer with random weights; a step is a forward pass."""
    config, width, length = config_of(settings), settings["width"], settings["length"]
    shared = ModelContext(width, 1, Precision(), Initialization(), local_hardware())
    mixer = mixer_class(config)(config, shared, parent=None)
    positions = jnp.arange(length)[None, :]
    mask = Mask(positions=positions)
    if settings["mixer"] == "longformer":  # as in training: any row might be padded
        mask = mask.replace(segments=jnp.ones((1, length), jnp.int32))
    inputs = MixerInputs(positions, mask, constants=mixer.constants(config, 0, width))
    x = jax.random.normal(jax.random.key(0), (1, length, width))
    params = jax.jit(lambda key: mixer.init(key, x, inputs))(jax.random.key(1))

    def forward(params: Any, x: jax.Array, mask: Mask) -> jax.Array:
        output: Any = mixer.apply(params, x, inputs.replace(mask=mask))
        return output.y

    program = jax.jit(forward).lower(params, x, mask).compile()
    before = resident_bytes()

    def run(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(program(params, x, mask))

    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    versions = {"jax": jax.__version__, "flax": flax.__version__}
    facts = {"parameters": count}
    # The system counts both a little late: the difference may be below zero.
    return Work(run, versions, facts, lambda: max(0, peak_resident_bytes() - before))


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    serve(build)

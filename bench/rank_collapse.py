"""Rank collapse: distance of a stack's outputs from one common vector, with and without residuals.

    python -m bench.rank_collapse [--figure docs/figures/rank_collapse.png]

Dong et al. 2021 (Attention is Not All You Need): layers of self-attention alone take their outputs
to rank one, doubly exponentially in depth. Residual connections slow that down; with pre-norm,
where deeper layers add relatively less to the stream, tokens stay distinct. The figure shows
the part of the outputs X that differs from token to token, |X - mean| / |X|, in stacks with random
weights on random inputs: the median of several.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    Initialization,
    Mask,
    NormConfig,
    Precision,
)
from transformer.attention.mixer import MixerInputs
from transformer.model_context import ModelContext
from transformer.models.block import Block

WIDTH, LENGTH, SEEDS = 64, 32, 5

ALONE = BlockConfig(
    mixer=AttentionConfig(num_heads=4, bias=False), feed_forward=None, norm=None, residual=False
)
FED = dataclasses.replace(ALONE, feed_forward=FeedForwardConfig(activation="relu", bias=False))
WHOLE = dataclasses.replace(FED, norm=NormConfig(), residual=True)
STACKS = {
    "attention alone": ALONE,
    "attention and feed-forward": FED,
    "attention and residuals": dataclasses.replace(ALONE, residual=True),
    "whole layers, post-norm": dataclasses.replace(WHOLE, norm_placement="post"),
    "whole layers, pre-norm": WHOLE,
}


def differing(x: jax.Array) -> jax.Array:  # [B, T, D] -> [B]
    """Return the fraction of each example, by norm, that differs between tokens."""
    deviation = x - jnp.mean(x, axis=1, keepdims=True)
    return jnp.linalg.norm(deviation, axis=(1, 2)) / jnp.linalg.norm(x, axis=(1, 2))


def shares(config: BlockConfig, layers: int) -> np.ndarray:  # [L + 1, examples]
    """Return the shares for random inputs and after each layer. Every layer has its own weights."""
    start = Initialization(std=0, depth_scaled=False)
    block = Block(config, ModelContext(WIDTH, layers, Precision(), start, Hardware()), parent=None)
    inputs = MixerInputs(jnp.arange(LENGTH)[None, :], Mask())

    @jax.jit
    def layer(key: jax.Array, x: jax.Array) -> jax.Array:
        output, _ = block.init_with_output(key, x, inputs)
        return output.x

    x = jax.random.normal(jax.random.key(0), (SEEDS, LENGTH, WIDTH))
    fractions = [differing(x)]
    for number in range(layers):
        x = layer(jax.random.key(1 + number), x)
        fractions.append(differing(x))
    return np.asarray(fractions)


def main(layers: int = 32, figure: Path = Path("docs/figures/rank_collapse.png")) -> None:
    """Print the fraction that remains after the last layer, and draw it layer by layer."""
    fig, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, config in STACKS.items():
        fractions = shares(config, layers)
        axes.semilogy(np.median(fractions, axis=1), ".-", label=name)
        print(f"{name}: {np.median(fractions[-1]):.1e} of the output differs between tokens")
    # Float32 cannot resolve smaller differences.
    axes.set(xlabel="layers", ylabel="share that differs, |X - mean| / |X|", ylim=(1e-8, 2))
    axes.legend(fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=120)
    pyplot.close(fig)


if __name__ == "__main__":
    tyro.cli(main)

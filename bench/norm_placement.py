"""Gradient norms by layer and depth for each norm placement, at initialization.

    python -m bench.norm_placement [--figure docs/figures/norm_placement.png]

With the norm after each residual connection, as published in 2017, the gradients of a decoder's
first layers are smaller than those of the last by a factor that is exponential in depth; with the
norm
before each sublayer they are nearly equal (Xiong et al. 2020). Most of the effect comes from cross
attention: what it adds hardly depends on the decoder's own stream, and the norm after it scales
that stream down, and the gradient with it. An encoder has no cross attention, and is nearly level
either
way (Liu et al. 2020). Weights are initialized by their fan-in, equally in every layer; tokens are
random.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot

from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    Initialization,
    NormConfig,
    SinusoidalPositions,
    TransformerConfig,
)
from transformer.models.block import NormPlacement

WIDTH, WORDS, ROWS, LENGTH = 64, 128, 8, 32
DEPTHS = (6, 12, 24, 48)
PLACEMENTS: tuple[NormPlacement, ...] = ("post", "pre")
SIDES = {"decoder": "-", "encoder": ":"}
"""The two stacks, and how they are drawn."""


def block(placement: NormPlacement, cross: AttentionConfig | None) -> BlockConfig:
    """Return a layer of the decoder, or without `cross` one of the encoder."""
    return BlockConfig(
        mixer=AttentionConfig(num_heads=4),
        cross_attention=cross,
        feed_forward=FeedForwardConfig(activation="relu"),
        norm_placement=placement,
    )


def model(placement: NormPlacement, layers: int) -> EncoderDecoder:
    """Return the transformer of 2017 in another size, or the same with pre-norm."""
    last = None if placement == "post" else NormConfig()
    config = TransformerConfig(
        vocab_size=WORDS,
        d_model=WIDTH,
        num_layers=layers,
        layer_pattern=(block(placement, AttentionConfig(num_heads=4)),),
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        encoder=EncoderConfig(layers, (block(placement, None),), last),
        final_norm=last,
        initialization=Initialization(std=0, embedding_std=WIDTH**-0.5, depth_scaled=False),
        layer_loop="scan",
    )
    return EncoderDecoder(config)


def gradient_norms(
    placement: NormPlacement, layers: int
) -> dict[str, np.ndarray]:  # [L] of each side
    """Return the norm of the loss gradient in the weights of each layer, first to last."""
    stacks = model(placement, layers)
    random = np.random.default_rng(0)
    source = jnp.asarray(random.integers(0, WORDS, (ROWS, LENGTH)))
    target = jnp.asarray(random.integers(0, WORDS, (ROWS, LENGTH + 1)))

    def loss(params: Any) -> jax.Array:
        logits = stacks.apply({"params": params}, source, target[:, :-1]).logits
        assert logits is not None
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_probs, target[:, 1:, None], axis=-1))

    key = jax.random.key(
        0, impl="unsafe_rbg"
    )  # unrolled layers would take five times as long to compile
    gradients = jax.jit(jax.grad(loss))(stacks.init_params(key))
    return {side: by_layer(gradients[side]["layers"]["place_0"]) for side in SIDES}


def by_layer(stacked: Any) -> np.ndarray:  # [L]
    """Return the norm over all weights of each layer."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(stacked)]
    return np.sqrt(sum(np.square(leaf).reshape(len(leaf), -1).sum(1) for leaf in leaves))


def main(figure: Path = Path("docs/figures/norm_placement.png")) -> None:
    """Print the ratio of the last to the first layer's gradient, and draw those of all layers."""
    fig, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for placement, axes in zip(PLACEMENTS, panels, strict=True):
        for layers, shade in zip(DEPTHS, np.linspace(0.85, 0.1, len(DEPTHS)), strict=True):
            for side, norms in gradient_norms(placement, layers).items():
                print(f"{placement}-norm, {layers} layers, {side}: {norms[-1] / norms[0]:,.2f}")
                look = dict(color=pyplot.colormaps["viridis"](shade), linestyle=SIDES[side])
                share = np.arange(1, layers + 1) / layers
                axes.semilogy(share, norms, label=f"{side}, {layers} layers", **look)
        axes.set(title=f"{placement}-norm", xlabel="layer / number of layers")
    panels[0].set_ylabel("norm of a layer's gradient at the start")
    panels[1].legend(fontsize=8, loc="lower right")
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=120)
    pyplot.close(fig)


if __name__ == "__main__":
    tyro.cli(main)

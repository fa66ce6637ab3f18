"""Residual connections, norms, depth and distance: at random weights, and in short runs."""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.claims.small_runs import (
    LENGTH,
    losses_by_position,
    on_wikitext,
    small,
    trained,
    with_mixer,
    with_model,
)
from bench.results import FIGURES, save_figure
from configs.versus import CHANGES
from configs.versus import EXPERIMENTS as RIVALS
from train.experiment import Experiment
from train.figures import shades
from transformer import (
    AttentionConfig,
    BlockConfig,
    ElmanConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    Hardware,
    Initialization,
    LSTMConfig,
    Mask,
    MaskPattern,
    NormConfig,
    Precision,
    SinusoidalPositions,
    TransformerConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.model_context import ModelContext
from transformer.models.block import Block, NormPlacement
from transformer.models.stack import Stack

WIDTH = 64
BY_FAN_IN = Initialization(std=0, depth_scaled=False)

# ---- Rank collapse ----

ATTENTION_ALONE = BlockConfig(
    mixer=AttentionConfig(num_heads=4, bias=False), feed_forward=None, norm=None, residual=False
)
FED = dataclasses.replace(
    ATTENTION_ALONE, feed_forward=FeedForwardConfig(activation="relu", bias=False)
)
WHOLE = dataclasses.replace(FED, norm=NormConfig(), residual=True)
LAYERS = {
    "attention alone": ATTENTION_ALONE,
    "attention and feed-forward": FED,
    "attention and residuals": dataclasses.replace(ATTENTION_ALONE, residual=True),
    "whole layers, post-norm": dataclasses.replace(WHOLE, norm_placement="post"),
    "whole layers, pre-norm": WHOLE,
}


def differing(x: jax.Array) -> jax.Array:  # [B, T, D] -> [B]
    """Return the fraction of each example, by norm, that differs between tokens."""
    deviation = x - jnp.mean(x, axis=1, keepdims=True)
    return jnp.linalg.norm(deviation, axis=(1, 2)) / jnp.linalg.norm(x, axis=(1, 2))


def differing_by_layer(config: BlockConfig, layers: int) -> np.ndarray:  # [L + 1, examples]
    """Return the fractions of random inputs and after each layer, which has its own weights."""
    context = ModelContext(WIDTH, layers, Precision(), BY_FAN_IN, Hardware())
    block, length, examples = Block(config, context, parent=None), 32, 5
    inputs = MixerInputs(jnp.arange(length)[None, :], Mask())

    @jax.jit
    def layer(key: jax.Array, x: jax.Array) -> jax.Array:
        output, _ = block.init_with_output(key, x, inputs)
        return output.x

    x = jax.random.normal(jax.random.key(0), (examples, length, WIDTH))
    fractions = [differing(x)]
    for number in range(layers):
        x = layer(jax.random.key(1 + number), x)
        fractions.append(differing(x))
    return np.asarray(fractions)


def rank_collapse() -> None:
    """Print the fraction of the outputs that differs between tokens, and draw it by layer.

    Layers of attention alone take their outputs to rank one, doubly exponentially in depth (Dong et
    al. 2021). Weights and inputs are random; the fraction is |X - mean| / |X|, the median of five.
    """
    drawn = Figure(figsize=(7, 4.2))
    axes = drawn.subplots()
    for name, config in LAYERS.items():
        fractions = differing_by_layer(config, layers=32)
        axes.semilogy(np.median(fractions, axis=1), label=name)
        print(f"{name}: {np.median(fractions[-1]):.1e} of the output differs between tokens")
    # Float32 cannot resolve smaller differences.
    axes.set(xlabel="layers", ylabel="share that differs, |X - mean| / |X|", ylim=(1e-8, 2))
    axes.legend(loc="lower right")
    save_figure(drawn, FIGURES / "rank_collapse.png")


# ---- Norm placement ----

PLACEMENTS: tuple[NormPlacement, ...] = ("post", "pre")


def translator(placement: NormPlacement, layers: int, words: int) -> EncoderDecoder:
    """Return the transformer of 2017 in another size, or the same with pre-norm."""
    layer = BlockConfig(
        mixer=AttentionConfig(num_heads=4),
        feed_forward=FeedForwardConfig(activation="relu"),
        norm_placement=placement,
    )
    decoder_layer = dataclasses.replace(layer, cross_attention=AttentionConfig(num_heads=4))
    last = None if placement == "post" else NormConfig()
    config = TransformerConfig(
        vocab_size=words,
        d_model=WIDTH,
        num_layers=layers,
        layer_pattern=(decoder_layer,),
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        encoder=EncoderConfig(layers, (layer,), last),
        final_norm=last,
        initialization=dataclasses.replace(BY_FAN_IN, embedding_std=WIDTH**-0.5),
        layer_loop="scan",
    )
    return EncoderDecoder(config)


def norms_by_side(placement: NormPlacement, layers: int) -> dict[str, np.ndarray]:  # [L] each
    """Return the norm of the loss's gradient in each layer of the decoder and of the encoder."""
    words, rows, length = 128, 8, 32
    model = translator(placement, layers, words)
    random = np.random.default_rng(0)
    source = jnp.asarray(random.integers(0, words, (rows, length)))
    target = jnp.asarray(random.integers(0, words, (rows, length + 1)))

    def loss(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, source, target[:, :-1]).logits
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_probs, target[:, 1:, None], axis=-1))

    # With the usual generator, unrolled layers would take five times as long to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    gradients = jax.jit(jax.grad(loss))(model.init_params(key))
    return {
        side: norms_by_layer(gradients[side]["layers"]["place_0"])
        for side in ("decoder", "encoder")
    }


def norms_by_layer(stacked: Any) -> np.ndarray:  # [L]
    """Return the norm over all weights of each layer, given weights [L, ...]."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(stacked)]
    return np.sqrt(sum(np.square(leaf).reshape(len(leaf), -1).sum(1) for leaf in leaves))


def norm_placement() -> None:
    """Print the last layer's gradient over the first's at the start, and draw those of all layers.

    With the norm after each residual connection, as published in 2017, the gradients of a decoder's
    first layers are smaller than those of the last by a factor that is exponential in depth (Xiong
    et al. 2020). Most of it comes from cross attention, whose output hardly depends on the
    decoder's stream, which the norm after it scales down; an encoder has none (Liu et al. 2020).
    """
    depths = (6, 12, 24, 48)
    drawn = Figure(figsize=(9, 4.2))
    panels = drawn.subplots(1, 2, sharey=True)
    for placement, axes in zip(PLACEMENTS, panels, strict=True):
        for layers, color in zip(depths, shades(len(depths))[::-1], strict=True):
            for side, norms in norms_by_side(placement, layers).items():
                print(f"{placement}-norm, {layers} layers, {side}: {norms[-1] / norms[0]:,.2f}")
                style = "-" if side == "decoder" else ":"
                share = np.arange(1, layers + 1) / layers
                axes.semilogy(share, norms, style, color=color, label=f"{side}, {layers} layers")
        axes.set(title=f"{placement}-norm", xlabel="layer / number of layers")
    panels[0].set_ylabel("norm of a layer's gradient at the start")
    panels[1].legend(loc="lower right")
    save_figure(drawn, FIGURES / "norm_placement.png")


# ---- Gradients over distance ----

RECURRENT = BlockConfig(mixer=ElmanConfig(), feed_forward=None, norm=None, residual=False)
TRANSFORMER = BlockConfig(mixer=AttentionConfig(num_heads=4))
STACKS: dict[str, tuple[BlockConfig, int, float]] = {
    "Elman": (RECURRENT, 1, 1.0),
    "Elman, recurrent matrix × 2": (RECURRENT, 1, 2.0),
    "LSTM": (dataclasses.replace(RECURRENT, mixer=LSTMConfig()), 1, 1.0),
    "transformer": (TRANSFORMER, 4, 1.0),
    "transformer without residuals": (dataclasses.replace(TRANSFORMER, residual=False), 4, 1.0),
}
"""Layers, their number, and the factor of recurrent matrices."""


def norms_by_distance(
    config: BlockConfig, layers: int, scale: float
) -> np.ndarray:  # [T] by distance from the last token
    """Return the root mean square, over rows, of the gradient of the last output in each token."""
    rows, length = 8, 256
    context = ModelContext(WIDTH, layers, Precision(), BY_FAN_IN, Hardware())
    stack = Stack((config,), context, "scan")
    for_weights, for_inputs, for_result = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(for_inputs, (rows, length, WIDTH))
    direction = jax.random.normal(for_result, (WIDTH,)) / WIDTH**0.5
    positions = jnp.arange(length)[None, :]
    inputs = MixerInputs(positions, Mask(MaskPattern(causal=True), positions=positions))
    params = jax.jit(lambda key: stack.init(key, x, inputs))(for_weights)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * (scale if path[-1].key == "recurrent" else 1.0), params
    )

    def last(x: jax.Array) -> jax.Array:
        output: Any = stack.apply(params, x, inputs)
        return jnp.sum(output.x[:, -1] @ direction)

    gradient = np.asarray(jax.jit(jax.grad(last))(x), np.float64)
    return np.sqrt(np.square(gradient).sum(-1).mean(0))[::-1]


def gradient_distance() -> None:
    """Print the gradient of the last output in earlier tokens at random weights, and draw all.

    In a recurrence it is a product of as many matrices as there are steps between them, so it
    vanishes or explodes (Bengio et al. 1994); attention reaches every token in one step. Without
    residuals a stack of attention loses the token itself: what remains comes mostly from the first
    tokens, which are in every average under a causal mask.
    """
    distances = (0, 1, 4, 16, 64, 255)
    drawn = Figure(figsize=(7, 4.2))
    axes = drawn.subplots()
    table = Table("distance", *map(str, distances), title=f"Gradient norms, width {WIDTH}")
    for name, (config, layers, scale) in STACKS.items():
        norms = norms_by_distance(config, layers, scale)
        table.add_row(name, *(f"{norms[distance]:.2g}" for distance in distances))
        axes.semilogy(np.where(norms > 1e-12, norms, np.nan), label=name)
    axes.set(xlabel="distance from the last token (tokens)", ylabel="norm of the gradient")
    axes.set_ylim(1e-12, 1e10)  # room for the legend
    axes.legend(ncols=2, loc="upper left")
    Console().print(table)
    save_figure(drawn, FIGURES / "gradient_distance.png")


# ---- Ablations: short runs of the quickstart's model ----

Group = Literal["heads", "documents", "residual", "feed_forward", "rivals"]


def _with_layer(base: Experiment, **changes: Any) -> Experiment:
    [block] = base.model.layer_pattern
    return with_model(base, layer_pattern=(dataclasses.replace(block, **changes),))


def heads(base: Experiment) -> dict[str, Experiment]:
    """Return different numbers of heads at the same total width."""
    return {
        f"{n} heads": with_model(
            base, layer_pattern=with_mixer(base.model, num_heads=n, num_kv_heads=n)
        )
        for n in (1, 2, 3, 6, 12)
    }


def documents(base: Experiment) -> dict[str, Experiment]:
    """Return windows as one token stream, or packed documents masked from each other."""
    masked = dataclasses.replace(base.text_data, document_masking=True)
    return {"one stream": base, "documents apart": dataclasses.replace(base, data=masked)}


def residual(base: Experiment) -> dict[str, Experiment]:
    """Return blocks with and without residual connections."""
    return {"with": base, "without": _with_layer(base, residual=False)}


def feed_forward(base: Experiment) -> dict[str, Experiment]:
    """Return activations, plain and gated, at nearly the same number of weights."""
    return {
        f"{name}, {'gated' if gated else 'plain'}": _with_layer(
            base, feed_forward=FeedForwardConfig(activation=name, gated=gated, bias=False)
        )
        for gated in (False, True)
        for name in ("relu", "gelu", "silu", "squared_relu")
    }


def rivals(base: Experiment) -> dict[str, Experiment]:
    """Return the recipes of `configs/versus.py` unchanged, with the same number of steps."""
    return {
        name: dataclasses.replace(each, steps=base.steps)
        for name, each in RIVALS.items()
        if name not in CHANGES
    }


GROUPS: dict[Group, Callable[[Experiment], dict[str, Experiment]]] = {
    "heads": heads,
    "documents": documents,
    "residual": residual,
    "feed_forward": feed_forward,
    "rivals": rivals,
}


def ablations(
    group: tyro.conf.Positional[Group],
    steps: int = 600,
    seeds: int = 1,
    data: Path | None = None,
    only: tuple[str, ...] = (),
) -> None:
    """Train the quickstart's model with one change at a time; print losses, spreads and seconds.

    Args:
      group: What is changed.
      steps: Steps of each run.
      seeds: Number of runs of each row.
      data: Folder with WikiText-2 in `wikitext-2`; without it, the quickstart's text.
      only: Rows to train; without it, all.
    """
    rows = GROUPS[group](small(steps))
    table = Table(group, "loss", "spread", "seconds", title=f"{steps} steps, {seeds} seeds")
    for name, experiment in rows.items():
        if only and name not in only:
            continue
        losses, seconds = [], []
        for seed in range(seeds):
            start = time.perf_counter()
            run = trained(on_wikitext(dataclasses.replace(experiment, seed=seed), data))
            seconds.append(time.perf_counter() - start)
            losses.append(losses_by_position(run, LENGTH, windows=512).mean())
        spread = f"{max(losses) - min(losses):.3f}" if seeds > 1 else "-"
        loss = f"{statistics.mean(losses):.4f}"
        row = name, loss, spread, f"{statistics.median(seconds):.0f}"
        table.add_row(*row)
        print(*row, file=sys.stderr, flush=True)
    Console().print(table)

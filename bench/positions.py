"""Held-out loss by position, within the training length and beyond it, for each position encoding.

    python -m bench.positions [--steps 600] [--figure docs/figures/positions.png]

Train the quickstart's model on windows of 128 tokens with each kind of position encoding. Then
evaluate it, without further training, on windows 1, 2, 4 and 8 times as long. All lengths are
evaluated on the same held-out text, so a lower loss at a longer length means that the additional
context helps, and a higher one that positions beyond the training length do harm.

Learned positions get a table of 1,024 rows, of which training on windows of 128 tokens updates the
first 128. The control `learned, trained on 1,024` has the same table and windows of 1,024 tokens.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import tyro
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from bench.small_runs import LENGTH, losses_by_position, small, trained, with_mixer
from train.experiment import Experiment
from transformer import LearnedPositions, NoPosition, RoPE, SinusoidalPositions
from transformer.attention.position_bias import (
    ALiBi,
    AttentionPosition,
    RelativePositions,
    T5RelativeBias,
)
from transformer.layers.position_embedding import PositionEmbedding

FACTORS = (1, 2, 4, 8)
LONGEST = LENGTH * FACTORS[-1]

KINDS: dict[str, tuple[PositionEmbedding, AttentionPosition]] = {
    "none": (NoPosition(), NoPosition()),
    "learned": (LearnedPositions(LONGEST), NoPosition()),
    "sinusoidal": (SinusoidalPositions(), NoPosition()),
    "relative (Shaw)": (NoPosition(), RelativePositions(max_distance=16)),
    "buckets (T5)": (NoPosition(), T5RelativeBias(32, 128)),
    "ALiBi": (NoPosition(), ALiBi()),
    "rotary": (NoPosition(), RoPE()),
}
"""The encoding added to the embeddings, and the one that attention applies."""

CONTROL = f"learned, trained on {LONGEST:,}"
BANDS = ((0, 128), (128, 256), (256, 512), (512, 1024))
"""Ranges of positions of the longest window, for the second table; the first is the training
length."""
SMOOTHING = 32  # positions averaged per point of the figure


def with_positions(experiment: Experiment, kind: str) -> Experiment:
    """Return the experiment with a kind of position encoding, or the control."""
    if kind == CONTROL:
        data = dataclasses.replace(experiment.text_data, sequence_length=LONGEST)
        # The same number of tokens per step as the other runs.
        batch_size = experiment.batch_size // FACTORS[-1]
        experiment = dataclasses.replace(experiment, data=data, batch_size=batch_size)
        kind = "learned"
    embedded, attended = KINDS[kind]
    model = experiment.model
    pattern = with_mixer(model, position=attended)
    model = dataclasses.replace(model, layer_pattern=pattern, position_embedding=embedded)
    if isinstance(embedded, SinusoidalPositions):
        # Sinusoids have amplitude 1, which would dominate embeddings of the usual size.
        # As published, embeddings are scaled by sqrt(D).
        start = dataclasses.replace(model.initialization, embedding_std=model.d_model**-0.5)
        model = dataclasses.replace(model, scale_embeddings=True, initialization=start)
    return dataclasses.replace(experiment, model=model)


def band_means(losses: np.ndarray) -> list[float]:
    """Return the mean loss in each of `BANDS`, given the loss by position of the longest window."""
    return [float(losses[begin:end].mean()) for begin, end in BANDS]


def draw(curves: dict[str, np.ndarray], figure: Path) -> None:
    """Draw the loss by position in the longest window: all kinds, and learned positions alone."""
    fig, (every, learned) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), sharey=True, layout="constrained"
    )
    colors = {kind: f"C{number}" for number, kind in enumerate(KINDS)}
    colors[CONTROL] = colors["learned"]
    positions = np.arange(LONGEST // SMOOTHING) * SMOOTHING + SMOOTHING // 2
    for kind, losses in curves.items():
        smooth = losses.reshape(-1, SMOOTHING).mean(axis=1)
        if kind != CONTROL:
            every.plot(positions, smooth, color=colors[kind], label=kind)
        if kind in ("none", "learned", CONTROL):
            style = "--" if kind == CONTROL else "-"
            learned.plot(positions, smooth, style, color=colors[kind], label=kind)
    for axes, title in ((every, f"trained on {LENGTH} tokens"), (learned, "learned positions")):
        axes.axvspan(0, LENGTH, color="grey", alpha=0.15, label=f"first {LENGTH} positions")
        axes.set(xlabel="position in the window (tokens)", title=title)
        axes.legend(fontsize=8)
    every.set_ylabel("held-out loss (nats a token)")
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=100)
    pyplot.close(fig)


def main(
    steps: int = 600,
    figure: Path = Path("docs/figures/positions.png"),
    kinds: tuple[str, ...] = (*KINDS, CONTROL),
    seed: int = 0,
) -> None:
    """Print the loss by length and by position, and draw the latter, for the given `kinds`."""
    lengths = Table("positions", *(f"T = {LENGTH * factor:,}" for factor in FACTORS))
    names = (f"{begin} to {end - 1:,}" for begin, end in BANDS)
    bands = Table("positions", *names, title=f"loss by position in windows of {LONGEST:,}")
    curves = {}
    for kind in kinds:
        run = trained(with_positions(small(steps, seed=seed), kind))
        by_length = [losses_by_position(run, LENGTH * factor) for factor in FACTORS]
        curves[kind] = by_length[-1]
        lengths.add_row(kind, *(f"{losses.mean():.3f}" for losses in by_length))
        bands.add_row(kind, *(f"{loss:.3f}" for loss in band_means(by_length[-1])))
        shown = (*(losses.mean() for losses in by_length), *band_means(by_length[-1]))
        print(kind, *(f"{loss:.3f}" for loss in shown), file=sys.stderr, flush=True)
        draw(curves, figure)
    console = Console()
    console.print(lengths)
    console.print(bands)


if __name__ == "__main__":
    tyro.cli(main)

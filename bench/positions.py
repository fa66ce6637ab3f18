"""What each kind of position makes of texts longer than those of training.

    python -m bench.positions [--steps 600] [--figure docs/figures/positions.png]

The quickstart's model, trained on windows of 128 tokens with each kind of position; then its
held-out loss over windows 1, 2, 4 and 8 times as long, and by place within the longest. Learned
positions have a table of the longest length, of which training meets the first 128 rows. Beside
sinusoidal ones embeddings are scaled by sqrt(D), as published.
"""

import dataclasses
from pathlib import Path

import numpy as np
import tyro
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from bench.small_runs import LENGTH, Trained, losses_by_position, small, trained, with_mixer
from train.experiment import Experiment
from transformer import LearnedPositions, NoPosition, Rotary, SinusoidalPositions
from transformer.positions import (
    ALiBi,
    AttentionPosition,
    BucketedBias,
    EmbeddingPosition,
    RelativePositions,
)

FACTORS = (1, 2, 4, 8)

KINDS: dict[str, tuple[EmbeddingPosition, AttentionPosition]] = {
    "none": (NoPosition(), NoPosition()),
    "learned": (LearnedPositions(LENGTH * FACTORS[-1]), NoPosition()),
    "sinusoidal": (SinusoidalPositions(), NoPosition()),
    "relative (Shaw)": (NoPosition(), RelativePositions(clip=16)),
    "buckets (T5)": (NoPosition(), BucketedBias(32, 128)),
    "ALiBi": (NoPosition(), ALiBi()),
    "rotary": (NoPosition(), Rotary()),
}
"""What the embeddings are told, and what attention knows."""


def positioned(experiment: Experiment, kind: str) -> Experiment:
    """The experiment with a kind of position."""
    embedded, attended = KINDS[kind]
    model = experiment.model
    pattern = with_mixer(model, position=attended)
    model = dataclasses.replace(model, pattern=pattern, position=embedded)
    if isinstance(embedded, SinusoidalPositions):  # else the waves would drown the words
        start = dataclasses.replace(model.initialization, embedding_std=model.width**-0.5)
        model = dataclasses.replace(model, embedding_scale=True, initialization=start)
    return dataclasses.replace(experiment, model=model)


def draw(curves: dict[str, np.ndarray], figure: Path) -> None:
    """The loss by place in the longest window, averaged over 32 places."""
    fig, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for kind, losses in curves.items():
        smooth = losses.reshape(-1, 32).mean(axis=1)
        axes.plot(np.arange(len(smooth)) * 32 + 16, smooth, label=kind)
    axes.axvline(LENGTH, color="grey", linestyle=":", label="longest in training")
    axes.set(xlabel="place in the window (tokens)", ylabel="held-out loss (nats a token)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 8))
    axes.legend(fontsize=8)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=120)
    pyplot.close(fig)


def main(
    steps: int = 600,
    figure: Path = Path("docs/figures/positions.png"),
    kinds: tuple[str, ...] = tuple(KINDS),
) -> None:
    """Prints losses by length, and draws them by place; of `kinds` of positions alone."""
    table = Table("positions", *(f"T = {LENGTH * factor}" for factor in FACTORS))
    curves = {}
    for kind in kinds:
        run: Trained = trained(positioned(small(steps), kind))
        by_place = [losses_by_position(run, LENGTH * factor) for factor in FACTORS]
        curves[kind] = by_place[-1]
        table.add_row(kind, *(f"{each.mean():.3f}" for each in by_place))
    draw(curves, figure)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)

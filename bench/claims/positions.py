"""Position encodings: pictured, and the loss within and beyond the training length."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.claims.small_runs import LENGTH, losses_by_position, small, trained, with_mixer
from bench.results import FIGURES, over_seeds, save_figure
from train.experiment import Experiment
from train.figures import COLORS, DASHES
from train.optim.schedules import ScheduleConfig
from transformer import LearnedPositions, NoPosition, RoPE, SinusoidalPositions
from transformer.attention.position_bias import (
    ALiBi,
    AttentionPosition,
    RelativePositions,
    T5RelativeBias,
)
from transformer.attention.rope import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    RopeScaling,
    YaRNScaling,
)
from transformer.layers.position_embedding import PositionEmbedding, sinusoidal_embedding


def sinusoids() -> None:
    """Draw sinusoidal position embeddings (Vaswani et al. 2017, section 3.5), a row per token."""
    length, width = 128, 64
    vectors = np.asarray(sinusoidal_embedding(jnp.arange(length)[None], width))[0]
    drawn = Figure(figsize=(6, 6))
    axes = drawn.subplots()
    axes.grid(visible=False)
    image = axes.imshow(
        vectors, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="dimension (even: sine, odd: cosine)", ylabel="position (tokens)")
    axes.set(xticks=range(0, width, 8), yticks=range(0, length, 16))
    drawn.colorbar(image, label="value")
    save_figure(drawn, FIGURES / "sinusoids.png")


# ---- The loss by position ----

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
"""Ranges of positions of the longest window; the first is the training length."""
BAND_NAMES = tuple(f"{begin} to {end - 1:,}" for begin, end in BANDS)
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


def smoothed(losses: np.ndarray) -> np.ndarray:  # [T] -> [T / SMOOTHING]
    """Return the mean of every `SMOOTHING` positions."""
    means: np.ndarray = losses.reshape(-1, SMOOTHING).mean(axis=1)
    return means


def band_means(losses: np.ndarray) -> list[float]:  # [T / SMOOTHING]
    """Return the mean in each of `BANDS` of smoothed losses."""
    return [float(losses[begin // SMOOTHING : end // SMOOTHING].mean()) for begin, end in BANDS]


def draw_by_position(curves: Mapping[str, np.ndarray]) -> Figure:
    """Draw the smoothed losses of the longest window by kind; the control beside, if it is there.

    A kind has the same colour everywhere.
    """
    beside = [kind for kind in ("none", "learned", CONTROL) if kind in curves]
    columns = 2 if CONTROL in curves else 1
    drawn = Figure(figsize=(9 if columns == 2 else 7, 4.4))
    panels = drawn.subplots(1, columns, sharey=True, squeeze=False)[0]
    positions = np.arange(LONGEST // SMOOTHING) * SMOOTHING + SMOOTHING // 2
    for axes, kinds in zip(panels, (set(curves) - {CONTROL}, beside), strict=False):
        for number, kind in enumerate((*KINDS, CONTROL)):
            if kind in kinds:
                look = {"color": COLORS[number % 7], "linestyle": DASHES[number % 7]}
                axes.plot(positions, curves[kind], label=kind, **look)
        axes.axvspan(0, LENGTH, color="grey", alpha=0.15, label=f"first {LENGTH} positions")
        axes.set_xlabel("position in the window (tokens)")
    panels[0].set_ylabel("held-out loss (nats per token)")
    if columns == 2:
        panels[0].set_title(f"trained on {LENGTH} tokens")
        panels[1].set_title("learned positions")
    for axes in panels:  # below: the curves leave no room
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return drawn


def positions(steps: int = 600) -> None:
    """Train on windows of 128 tokens; print the loss by length and by position, and draw it.

    All lengths, up to eight times the trained one, are evaluated on the same held-out text. Learned
    positions have 1,024 rows, of which training updates 128; the control is trained on windows of
    1,024. `python -m bench lengths` has several seeds.
    """
    lengths = Table("positions", *(f"T = {LENGTH * factor:,}" for factor in FACTORS))
    bands = Table("positions", *BAND_NAMES, title=f"loss by position in windows of {LONGEST:,}")
    curves = {}
    for kind in (*KINDS, CONTROL):
        run = trained(with_positions(small(steps), kind))
        by_length = [losses_by_position(run, LENGTH * factor) for factor in FACTORS]
        curves[kind] = smoothed(by_length[-1])
        lengths.add_row(kind, *(f"{losses.mean():.3f}" for losses in by_length))
        bands.add_row(kind, *(f"{loss:.3f}" for loss in band_means(curves[kind])))
    save_figure(draw_by_position(curves), FIGURES / "positions.png")
    console = Console()
    console.print(lengths)
    console.print(bands)


# ---- RoPE in longer contexts ----


def rules(factor: float) -> dict[str, RopeScaling]:
    """Return every extension rule for a context `factor` times longer."""
    return {
        "none": NoScaling(),
        "linear": LinearScaling(factor),
        "NTK-aware": NTKScaling(factor),
        "YaRN": YaRNScaling(factor, original_max_length=LENGTH, beta_fast=8.0),
        "Llama 3": Llama3Scaling(factor, original_max_length=LENGTH),
    }


def stretched(experiment: Experiment, scaling: RopeScaling, factor: int) -> Experiment:
    """Return the experiment at a longer length: same tokens per step, a fifth of the rate."""
    pattern = with_mixer(experiment.model, position=RoPE(scaling=scaling))
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, layer_pattern=pattern),
        data=dataclasses.replace(experiment.text_data, sequence_length=LENGTH * factor),
        schedule=ScheduleConfig("linear", learning_rate=8e-4, warmup_steps=5, min_lr_ratio=0.0),
        batch_size=max(1, experiment.batch_size // factor),
        steps=60,
        seed=experiment.seed + 1,
    )


def extended_losses(base: Experiment) -> tuple[float, dict[str, list[float]]]:
    """Return the loss at the trained length, and of each rule at every factor as is and tuned."""
    run = trained(base)
    vocabulary = run.model.config.vocab_size
    losses: dict[str, list[float]] = {rule: [] for rule in rules(1)}
    for factor in FACTORS[1:]:
        for rule, scaling in rules(factor).items():
            longer = stretched(base, scaling, factor)
            config = dataclasses.replace(longer.model, vocab_size=vocabulary)
            tuned = trained(longer, run.params)
            losses[rule] += [
                float(losses_by_position(run, LENGTH * factor, config=config).mean()),
                float(losses_by_position(tuned, LENGTH * factor).mean()),
            ]
    return float(losses_by_position(run, LENGTH).mean()), losses


def context_extension(data: Path, seeds: int = 1) -> None:
    """Print losses at 2, 4 and 8 times the trained length by rule, as is and after fine-tuning.

    Args:
      data: Folder with WikiText-2 in `wikitext-2`.
      seeds: Number of models; with several, means and standard deviations are printed.
    """
    measured = []
    for seed in range(seeds):
        measured.append(extended_losses(small(600, seed=seed, data=data)))
        print(f"seed {seed}: {measured[-1]}", file=sys.stderr, flush=True)
    own = over_seeds([loss for loss, _ in measured], 3)
    columns = [f"T = {LENGTH * n}, {when}" for n in FACTORS[1:] for when in ("as is", "tuned")]
    title = f"trained at T = {LENGTH}, where the loss is {own}; {seeds} seeds"
    table = Table("rule", *columns, title=title)
    for rule in rules(1):
        of_seeds = zip(*(losses[rule] for _, losses in measured), strict=True)
        table.add_row(rule, *(over_seeds(losses, 3) for losses in of_seeds))
    Console(width=140).print(table)

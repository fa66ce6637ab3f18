"""Transformer against Transformer++ at equal compute, and one change at a time.

All models have two layers and heads of width `HEAD_WIDTH`, so that sizes can be close. The text is
WikiText-2.

1. Learning rates: each recipe is tuned on the two smallest widths.
2. Frontiers: each recipe at every width, trained on `TOKENS_PER_PARAMETER` tokens per
   parameter without embeddings. The parameters of both agree within some percent at a width, so
   compute agrees too. Larger widths have the learning rate of the second width times
   sqrt(D2 / D).
3. The factor: how much more compute the older recipe needs for the loss that it reaches at a
   width, by interpolation between the newer one's points. Its spread is the range over resamples of
   each recipe's seeds.
4. Changes: the older recipe at one width with each change alone, and with all of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bench.claims.small_runs import on_wikitext, with_mixer, with_vocabulary
from bench.results import over_seeds
from bench.studies.finished_runs import FinishedRun
from bench.studies.record import Study, markdown_table, sweep_run
from configs.versus import CHANGES, EXPERIMENTS
from train.experiment import CheckpointConfig, Experiment
from train.figures import COLORS, DASHES
from train.optim.schedules import ScheduleConfig
from train.scaling.design import (
    SizeRules,
    count_without_embeddings,
    model_of_width,
    with_model_and_tokens,
)
from train.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN
from train.sweep.grid import SweepRun

OLD, NEW = "transformer", "transformer_plus_plus"
RULES = SizeRules(lr_rule="constant", min_steps=100)

WIDTHS = (64, 112, 160, 208, 352)
CHANGED_WIDTH = 112
"""Width of the models with one change."""
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
HEAD_WIDTH = 16
TOKENS_PER_PARAMETER = 10


def sized(recipe: str, width: int, rate: float, seed: int, data: Path) -> Experiment:
    """Return a recipe at a width, with a learning rate and tokens in proportion to parameters."""
    base = with_vocabulary(on_wikitext(EXPERIMENTS[recipe], data), 1024)
    layers = with_mixer(base.model, num_heads=base.model.d_model // HEAD_WIDTH)
    model = dataclasses.replace(base.model, layer_pattern=layers)
    assert isinstance(base.schedule, ScheduleConfig)
    schedule = dataclasses.replace(base.schedule, learning_rate=rate)
    base = dataclasses.replace(base, schedule=schedule, seed=seed)
    model = dataclasses.replace(model_of_width(model, width, RULES), num_layers=2)
    tokens = TOKENS_PER_PARAMETER * count_without_embeddings(model)
    found = with_model_and_tokens(base, model, tokens, RULES)
    return dataclasses.replace(found, checkpoint=CheckpointConfig(every=200, keep_last=1))


def compute(experiment: Experiment) -> float:
    """Return training FLOPs, 6 N D."""
    tokens = experiment.steps * experiment.batch_size * experiment.sequence_length
    parameters = count_without_embeddings(experiment.model)
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)


def tuned_rates(
    runs: Sequence[SweepRun], finished: Mapping[str, FinishedRun]
) -> dict[str, dict[int, float]]:
    """Return the learning rate of each recipe at each width."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for run in runs:
        at = run.settings["recipe"], int(run.settings["width"])
        found = finished[run.name].result.value, float(run.settings["rate"])
        best[at] = min(best.get(at, (math.inf, 0.0)), found)
    rates: dict[str, dict[int, float]] = {}
    for recipe in (OLD, NEW):
        second = best[recipe, WIDTHS[1]][1]
        rates[recipe] = {width: second * math.sqrt(WIDTHS[1] / width) for width in WIDTHS}
        rates[recipe] |= {width: best[recipe, width][1] for width in WIDTHS[:2]}
    return rates


class Frontier(NamedTuple):
    """Runs of a recipe at increasing widths."""

    flops: np.ndarray  # [widths], increasing
    losses: np.ndarray  # [widths, seeds]


class Factor(NamedTuple):
    """How much more compute the old recipe needs, and the range over resampled seeds."""

    value: float
    low: float
    high: float
    first: float
    """FLOPs of the newer recipe's points between which its compute is read off: `first`, `last`."""
    last: float


class Reading(NamedTuple):
    """Compute at which a frontier reaches each of some losses."""

    compute: np.ndarray  # [losses]
    first: np.ndarray  # [losses] compute of the points whose line it lies on
    last: np.ndarray


def compute_factors(old: Frontier, new: Frontier) -> list[Factor]:
    """Return how much more compute the old recipe needs for the losses that it reaches.

    The compute of the new recipe is read off the straight lines between its own points, log loss
    over log compute: no law is assumed, which runs of this size need not follow.

    Returns:
      A factor for every width but the smallest.
    """

    def read(old_losses: np.ndarray, new_losses: np.ndarray) -> Reading:  # [widths - 1]
        return interpolate_compute(new.flops, new_losses.mean(axis=1), old_losses.mean(axis=1)[1:])

    found, (widths, seeds) = read(old.losses, new.losses), old.losses.shape
    generator = np.random.default_rng(0)
    rows = np.arange(widths)[:, None]
    drawn = []
    for _ in range(1000):
        first, second = generator.integers(0, seeds, (2, widths, seeds))
        sample = read(old.losses[rows, first], new.losses[rows, second])
        drawn.append(old.flops[1:] / sample.compute)
    low, high = np.min(drawn, axis=0), np.max(drawn, axis=0)
    columns = old.flops[1:] / found.compute, low, high, found.first, found.last
    return [Factor(*map(float, each)) for each in zip(*columns, strict=True)]


def interpolate_compute(
    flops: np.ndarray,  # [n], increasing
    losses: np.ndarray,  # [n]
    targets: np.ndarray,  # [m] losses
) -> Reading:  # [m]
    """Return the compute at which a frontier reaches each loss; beyond its ends, along them.

    The frontier is the lowest loss of at most that compute: it never rises.
    """
    x, y = np.log(flops), np.log(np.minimum.accumulate(losses))
    keep = np.append(True, np.diff(y) < 0)
    x, y, flops = x[keep], y[keep], flops[keep]
    wanted = np.log(targets)
    segment = np.clip(np.searchsorted(-y, -wanted) - 1, 0, len(x) - 2)
    slope = (y[segment + 1] - y[segment]) / (x[segment + 1] - x[segment])
    compute: np.ndarray = np.exp(x[segment] + (wanted - y[segment]) / slope)
    return Reading(compute, flops[segment], flops[segment + 1])


def draw(frontiers: Mapping[str, Frontier]) -> Figure:
    """Draw both frontiers: loss over compute, every seed and the mean."""
    figure = Figure(figsize=(7, 4.6))
    axes = figure.subplots()
    for number, (recipe, (flops, losses)) in enumerate(frontiers.items()):
        color, style = COLORS[number], DASHES[number]
        look = {"color": color, "linestyle": style, "marker": "o"}
        axes.loglog(flops, losses.mean(axis=1), label=recipe, **look)
        axes.loglog(flops, losses, ".", color=color, alpha=0.5)
    axes.set(xlabel="training compute 6 N D (FLOPs)", ylabel="held-out loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6))  # less than a decade: no powers of ten
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    return figure


def frontier_table(
    experiments: Mapping[str, Sequence[Experiment]],  # [widths], of the first seed
    frontiers: Mapping[str, Frontier],
) -> str:
    """Return the table of all sizes as Markdown."""
    rows = []
    for index, width in enumerate(WIDTHS):
        for recipe, frontier in frontiers.items():
            each = experiments[recipe][index]
            assert isinstance(each.schedule, ScheduleConfig)
            row = [str(width), recipe, f"{frontier.flops[index]:.3e}"]
            row += [f"{each.steps:,}", str(each.batch_size), f"{each.schedule.learning_rate:.2g}"]
            rows.append([*row, over_seeds(frontier.losses[index], 4)])
    header = ["width", "recipe", "FLOPs", "steps", "batch size", "learning rate", "loss"]
    return markdown_table(header, rows)


def factor_table(old: Frontier, factors: Sequence[Factor]) -> str:
    """Return the factors as Markdown, with the points between which they are read off."""
    rows = [
        [
            str(width),
            f"{loss:.4f}",
            f"{factor.value:.2f}",
            f"{factor.low:.2f} to {factor.high:.2f}",
            f"{factor.first:.3g} and {factor.last:.3g}",
        ]
        for width, loss, factor in zip(
            WIDTHS[1:], old.losses.mean(axis=1)[1:], factors, strict=True
        )
    ]
    header = ["width", "loss", "factor", "range", f"FLOPs of the two points of `{NEW}`"]
    return markdown_table(header, rows)


def main(data: Path, seeds: int = 3, minutes: float = 0) -> None:
    """How much more compute does the Transformer of 2017 need than Transformer++?"""
    study = Study("versus", minutes)

    def run_of(recipe: str, width: int, rate: float, seed: int, settings: str) -> SweepRun:
        at = {"recipe": recipe, "width": str(width), "rate": f"{rate:g}"}
        name = f"{recipe},width={width},{settings}"
        return sweep_run(at, sized(recipe, width, rate, seed, data), name)

    # Parts share runs: the best of the tuning are the first seeds of the frontiers.
    tuning = [
        run_of(recipe, width, rate, 0, f"rate={rate:g}")
        for width in WIDTHS[:2]
        for recipe in (OLD, NEW)
        for rate in RATES
    ]
    chosen = tuned_rates(tuning, study.train(tuning, part="rates"))
    frontier = {
        (recipe, width): [
            run_of(recipe, width, chosen[recipe][width], seed, f"seed={seed}")
            for seed in range(seeds)
        ]
        for width in WIDTHS
        for recipe in (OLD, NEW)
    }
    found = study.train([*itertools.chain(*frontier.values())], part="frontiers")
    experiments = {
        recipe: [frontier[recipe, width][0].experiment for width in WIDTHS] for recipe in (OLD, NEW)
    }
    frontiers = {
        recipe: Frontier(
            np.array([compute(each) for each in experiments[recipe]]),
            np.array(
                [[found[run.name].result.value for run in frontier[recipe, w]] for w in WIDTHS]
            ),
        )
        for recipe in (OLD, NEW)
    }
    factors = compute_factors(frontiers[OLD], frontiers[NEW])

    # All recipes have the old one's learning rate, so a change that allows a higher one gains less.
    rate = chosen[OLD][CHANGED_WIDTH]
    changes = {
        name: [run_of(name, CHANGED_WIDTH, rate, seed, f"seed={seed}") for seed in range(seeds)]
        for name in (OLD, *CHANGES, NEW)
    }
    changed = study.train([*itertools.chain(*changes.values())], part="changes")
    losses = {
        name: np.array([changed[run.name].result.value for run in runs])
        for name, runs in changes.items()
    }
    rows = [
        [
            name,
            f"{changes[name][0].experiment.steps:,}",
            over_seeds(each, 4),
            f"{each.mean() - losses[OLD].mean():+.4f}",
        ]
        for name, each in losses.items()
    ]
    tables = [
        factor_table(frontiers[OLD], factors),
        frontier_table(experiments, frontiers),
        markdown_table(["recipe", "steps", "loss", "change"], rows),
    ]
    plain = {
        "widths": WIDTHS,
        "flops": {name: each.flops.tolist() for name, each in frontiers.items()},
        "losses": {name: each.losses.tolist() for name, each in frontiers.items()},
        "learning_rates": chosen,
        "compute_factors": [factor._asdict() for factor in factors],
        "changes": {name: each.result.value for name, each in changed.items()},
    }
    study.write(tables, draw(frontiers), plain)

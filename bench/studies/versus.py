"""Transformer against Transformer++ at equal compute, and one change at a time.

    python -m bench.studies.versus [--data DATA] [--widths 64 112 160 208 352] [--minutes 10]

The corpus is the source of Python's standard library, or WikiText-2 in DATA/wikitext-2/.

All models have `--depth` layers and heads of width `HEAD_WIDTH`, so that sizes can be close.

1. Learning rates: each recipe is tuned on the two smallest widths.
2. Frontiers: each recipe at every width, trained on `tokens_per_parameter` tokens per
   parameter without embeddings. The parameters of both agree within some percent at a width, so
   compute agrees too. Larger widths have the learning rate of the second width times
   sqrt(D2 / D).
3. The factor: how much more compute the older recipe needs for the loss that it reaches at a
   width, by interpolation between the newer one's points. Its spread is over resamples of each
   recipe's seeds: their range, or with `MIN_SEEDS` seeds or more the 95% interval.
4. Changes: the older recipe at one width with each change alone, and with all of them.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bench.claims.small_runs import corpus_name, on_wikitext, with_mixer
from bench.command import command
from bench.studies.record import (
    NO_LIMIT,
    Page,
    QueueFlags,
    Study,
    markdown_table,
    over_seeds,
    seeds_of,
    sweep_run,
)
from configs.versus import CHANGES, EXPERIMENTS, VOCAB_SIZE
from train.experiment import CheckpointConfig, Experiment
from train.figures import COLORS, DASHES
from train.optim.schedules import ScheduleConfig
from train.scaling.design import (
    SizeRules,
    count_without_embeddings,
    format_count,
    model_of_width,
    with_model_and_tokens,
)
from train.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult

OLD, NEW = "transformer", "transformer_plus_plus"
RULES = SizeRules(lr_rule="constant", min_steps=100)

HEAD_WIDTH = 16

MIN_SEEDS = 5
"""Seeds below which resamples have too few values for a 95% interval."""

WIDE_SEGMENT = 10
"""Ratio of compute between two points beyond which the page says that no run lies between them."""


def sized(
    recipe: str,
    width: int,
    rate: float,
    ratio: float,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    depth: int = 2,
    data: Path | None = None,
) -> Experiment:
    """Return a recipe at a width, with a learning rate and tokens in proportion to parameters."""
    base = on_wikitext(EXPERIMENTS[recipe], data)
    layers = with_mixer(base.model, num_heads=base.model.d_model // HEAD_WIDTH)
    model = dataclasses.replace(base.model, layer_pattern=layers)
    tokenizer = dataclasses.replace(base.text_data.tokenizer, vocab_size=vocab_size)
    text = dataclasses.replace(base.text_data, tokenizer=tokenizer)
    assert isinstance(base.schedule, ScheduleConfig)
    schedule = dataclasses.replace(base.schedule, learning_rate=rate)
    base = dataclasses.replace(base, data=text, schedule=schedule, seed=seed)
    model = dataclasses.replace(model_of_width(model, width, RULES), num_layers=depth)
    tokens = ratio * count_without_embeddings(model)
    found = with_model_and_tokens(base, model, tokens, RULES)
    return dataclasses.replace(found, checkpoint=CheckpointConfig(every=200, keep_last=1))


def compute(experiment: Experiment) -> float:
    """Return training FLOPs, 6 N D."""
    tokens = experiment.steps * experiment.batch_size * experiment.sequence_length
    parameters = count_without_embeddings(experiment.model)
    return float(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens)


def tuned_rates(
    runs: Sequence[SweepRun], results: Mapping[str, RunResult], widths: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return the learning rate of each recipe at each width."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for run in runs:
        at = run.settings["recipe"], int(run.settings["width"])
        found = results[run.name].value, float(run.settings["rate"])
        best[at] = min(best.get(at, (math.inf, 0.0)), found)
    rates: dict[str, dict[int, float]] = {}
    for recipe in (OLD, NEW):
        second = best[recipe, widths[1]][1]
        rates[recipe] = {width: second * math.sqrt(widths[1] / width) for width in widths}
        rates[recipe] |= {width: best[recipe, width][1] for width in widths[:2]}
    return rates


class Frontier(NamedTuple):
    """Runs of a recipe at increasing widths."""

    flops: np.ndarray  # [widths], increasing
    losses: np.ndarray  # [widths, seeds]


class Factor(NamedTuple):
    """How much more compute the old recipe needs, and the spread over resampled seeds."""

    value: float
    low: float  # NaN with one seed
    high: float
    first: float
    """FLOPs of the newer recipe's points between which its compute is read off: `first`, `last`."""
    last: float


class Reading(NamedTuple):
    """Compute at which a frontier reaches each of some losses."""

    compute: np.ndarray  # [losses]
    first: np.ndarray  # [losses] compute of the points whose line it lies on
    last: np.ndarray


def compute_factors(old: Frontier, new: Frontier, *, samples: int = 1000) -> list[Factor]:
    """Return how much more compute the old recipe needs for the losses that it reaches.

    The compute of the new recipe is read off the straight lines between its own points, log loss
    over log compute: no law is assumed, which runs of this size need not follow.

    Returns:
      A factor for every width but the smallest.
    """

    def read(old_losses: np.ndarray, new_losses: np.ndarray) -> Reading:  # [widths - 1]
        return interpolate_compute(new.flops, new_losses.mean(axis=1), old_losses.mean(axis=1)[1:])

    found, (widths, seeds) = read(old.losses, new.losses), old.losses.shape
    low = high = np.full(widths - 1, math.nan)
    if seeds > 1:
        generator = np.random.default_rng(0)
        rows = np.arange(widths)[:, None]
        drawn = []
        for _ in range(samples):
            first, second = generator.integers(0, seeds, (2, widths, seeds))
            sample = read(old.losses[rows, first], new.losses[rows, second])
            drawn.append(old.flops[1:] / sample.compute)
        ends = [0.025, 0.975] if seeds >= MIN_SEEDS else [0, 1]
        low, high = np.quantile(drawn, ends, axis=0)
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
    if len(x) < 2:
        nothing = np.full(len(targets), math.nan)
        return Reading(nothing, nothing, nothing)
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
    for index in range(len(experiments[OLD])):
        for recipe, frontier in frontiers.items():
            each = experiments[recipe][index]
            assert isinstance(each.schedule, ScheduleConfig)
            row = [str(each.model.d_model), recipe, f"{frontier.flops[index]:.3e}"]
            row += [f"{each.steps:,}", str(each.batch_size), f"{each.schedule.learning_rate:.2g}"]
            rows.append([*row, over_seeds(frontier.losses[index], 4)])
    header = ["width", "recipe", "FLOPs", "steps", "batch size", "learning rate", "loss"]
    return markdown_table(header, rows)


def factor_table(widths: Sequence[int], old: Frontier, factors: Sequence[Factor]) -> str:
    """Return the factors as Markdown, with the points between which they are read off."""
    seeds = old.losses.shape[1]
    spread = "95% interval" if seeds >= MIN_SEEDS else "range"
    rows = []
    for width, loss, factor in zip(widths[1:], old.losses.mean(axis=1)[1:], factors, strict=True):
        over = f"{factor.low:.2f} to {factor.high:.2f}" if seeds > 1 else "one seed"
        between = f"{factor.first:.3g} and {factor.last:.3g}"
        rows.append([str(width), f"{loss:.4f}", f"{factor.value:.2f}", over, between])
    header = ["width", "loss", "factor", spread, f"FLOPs of the two points of `{NEW}`"]
    return markdown_table(header, rows)


def describe_factors(widths: Sequence[int], factors: Sequence[Factor]) -> str:
    """Return what the factors are, and which are read off a wide segment."""
    wide = [
        f"{factor.last / factor.first:.0f}-fold apart at width {width}"
        for width, factor in zip(widths[1:], factors, strict=True)
        if factor.last > WIDE_SEGMENT * factor.first
    ]
    meaning = (
        f"The factor is how much more compute `{OLD}` needs than `{NEW}` for the loss that it has "
        f"at a width, read off the straight line between two points of `{NEW}` in the figure, with "
        "its spread over resampled seeds."
    )
    if wide:
        meaning += (
            f" The two points are {', '.join(wide)}: no run lies between them, so the factor there "
            "is that of a straight line, not a measured one."
        )
    return meaning


def change_rows(
    runs: Mapping[str, Sequence[SweepRun]], results: Mapping[str, RunResult]
) -> list[tuple[str, int, np.ndarray, float]]:
    """Return recipe, steps, losses [seeds] and the change of the mean, of one change at a time."""
    losses = {
        name: np.array([results[run.name].value for run in each]) for name, each in runs.items()
    }
    return [
        (name, runs[name][0].experiment.steps, each, float(each.mean() - losses[OLD].mean()))
        for name, each in losses.items()
    ]


@command
def main(
    widths: tuple[int, ...] = (64, 112, 160, 208, 352),
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    seeds: int = 3,
    tokens_per_parameter: float = 10,
    change_width: int = 112,
    vocab_size: int = 1024,
    depth: int = 2,
    data: Path | None = None,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """How much more compute does the Transformer of 2017 need than Transformer++?"""
    study, ratio = Study("versus", queue), tokens_per_parameter

    def run_of(recipe: str, width: int, rate: float, seed: int, settings: str) -> SweepRun:
        at = {"recipe": recipe, "width": str(width), "rate": f"{rate:g}"}
        made = sized(recipe, width, rate, ratio, seed, vocab_size, depth, data)
        return sweep_run(at, made, f"{recipe},width={width},{settings}")

    # Parts share runs: the best of the tuning are the first seeds of the frontiers.
    tuning = [
        run_of(recipe, width, rate, 0, f"rate={rate:g}")
        for width in widths[:2]
        for recipe in (OLD, NEW)
        for rate in rates
    ]
    chosen = tuned_rates(tuning, study.train(tuning, part="rates"), widths)
    frontier = {
        (recipe, width): [
            run_of(recipe, width, chosen[recipe][width], seed, f"seed={seed}")
            for seed in range(seeds)
        ]
        for width in widths
        for recipe in (OLD, NEW)
    }
    found = study.train([*itertools.chain(*frontier.values())], part="frontiers")
    experiments = {
        recipe: [frontier[recipe, width][0].experiment for width in widths] for recipe in (OLD, NEW)
    }
    frontiers = {
        recipe: Frontier(
            np.array([compute(each) for each in experiments[recipe]]),
            np.array([[found[run.name].value for run in frontier[recipe, w]] for w in widths]),
        )
        for recipe in (OLD, NEW)
    }
    factors = compute_factors(frontiers[OLD], frontiers[NEW])

    # All recipes have the old one's learning rate, so a change that allows a higher one gains less.
    rate = chosen[OLD].get(change_width) or chosen[OLD][widths[1]]
    changes = {
        name: [run_of(name, change_width, rate, seed, f"seed={seed}") for seed in range(seeds)]
        for name in (OLD, *CHANGES, NEW)
    }
    changed = study.train([*itertools.chain(*changes.values())], part="changes")
    alone = change_rows(changes, changed)
    best, *_, gain = min((row for row in alone if row[0] in CHANGES), key=lambda row: row[-1])
    sizes = [count_without_embeddings(each.model) for each in experiments[NEW][1:]]
    times = [
        f"{factor.value:.2f} times at {format_count(size)}"
        for factor, size in zip(factors, sizes, strict=True)
    ]
    first = experiments[OLD][0]
    page = Page(
        title="Transformer against Transformer++",
        question="How much more compute does the Transformer of 2017 need for the same loss?",
        answer=(
            f"{', '.join(times)} parameters without embeddings. Of one change at a time `{best}` "
            f"changes the loss most, by {gain:+.3f}; all together by {alone[-1][-1]:+.3f}."
        ),
        table=factor_table(widths, frontiers[OLD], factors),
        settings=(
            f"{describe_factors(widths, factors)} Held-out loss in nats per token, "
            f"{seeds_of(seeds)}; {ratio:g} tokens for each parameter, a vocabulary of "
            f"{vocab_size:,}, {depth} layers with heads of width {HEAD_WIDTH}. The text is "
            f"{corpus_name(first)}, in rows of {first.sequence_length} tokens. The findings hold "
            "at this scale only."
        ),
        more=[
            "All sizes:",
            frontier_table(experiments, frontiers),
            f"One change at a time at width {change_width}, with the learning rate of `{OLD}`:",
            markdown_table(
                ["recipe", "steps", "loss", "change"],
                [
                    [name, f"{steps:,}", over_seeds(losses, 4), f"{change:+.4f}"]
                    for name, steps, losses, change in alone
                ],
            ),
        ],
    )
    plain: dict[str, Any] = {
        "widths": widths,
        "flops": {name: each.flops.tolist() for name, each in frontiers.items()},
        "losses": {name: each.losses.tolist() for name, each in frontiers.items()},
        "learning_rates": chosen,
        "compute_factors": [
            {name: value if math.isfinite(value) else None for name, value in each.items()}
            for each in (factor._asdict() for factor in factors)
        ],
        "changes": {name: each.value for name, each in changed.items()},
    }
    study.write(page, draw(frontiers), plain)


if __name__ == "__main__":
    sys.exit(main())

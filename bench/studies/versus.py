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

The queue resumes: with --minutes the command stops in time, and continues when it is run again.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from bench.small_runs import corpus_name, on_wikitext, with_mixer
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    results_by_settings,
    run_study,
    single_run,
    train_all,
    write_record,
)
from configs.versus import CHANGES, EXPERIMENTS, VOCAB_SIZE
from train.experiment import CheckpointConfig, Experiment
from train.optim.schedules import ScheduleConfig
from train.scaling.design import (
    SizeRules,
    count_without_embeddings,
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


def draw(frontiers: Mapping[str, Frontier], path: Path) -> None:
    """Draw both frontiers: loss over compute, every seed and the mean."""
    figure = Figure(figsize=(6.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, (recipe, (flops, losses)) in enumerate(frontiers.items()):
        axes.loglog(flops, losses.mean(axis=1), "o-", color=f"C{number}", ms=4, label=recipe)
        axes.loglog(flops, losses, ".", color=f"C{number}", ms=3, alpha=0.5)
    axes.set(xlabel="training compute 6 N D (FLOPs)", ylabel="held-out loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6))  # less than a decade: no powers of ten
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    axes.grid(visible=True, which="both", alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def mean_and_deviation(losses: np.ndarray) -> tuple[float, float]:  # [seeds]
    """Return the mean over seeds and their standard deviation; 0 of one seed."""
    return float(losses.mean()), float(losses.std(ddof=1)) if len(losses) > 1 else 0.0


def describe_frontiers(
    experiments: Mapping[str, Sequence[Experiment]],  # [widths], of the first seed
    frontiers: Mapping[str, Frontier],
    ratio: float,
) -> str:
    """Return the table of all sizes as Markdown, with the scale at which the findings hold."""
    rows = []
    for index in range(len(experiments[OLD])):
        for recipe, frontier in frontiers.items():
            each = experiments[recipe][index]
            assert isinstance(each.schedule, ScheduleConfig)
            mean, deviation = mean_and_deviation(frontier.losses[index])
            rows.append(
                [
                    str(each.model.d_model),
                    recipe,
                    f"{frontier.flops[index]:.3e}",
                    f"{each.steps:,}",
                    str(each.batch_size),
                    f"{each.schedule.learning_rate:.2g}",
                    f"{mean:.4f} ± {deviation:.4f}",
                ]
            )
    first = experiments[OLD][0]
    largest = max(count_without_embeddings(runs[-1].model) for runs in experiments.values())
    seeds = frontiers[OLD].losses.shape[1]
    scale = (
        f"Held-out loss (nats per token) of models of up to {largest:,} parameters without "
        f"embeddings, {ratio:g} tokens for each, a vocabulary of "
        f"{first.text_data.tokenizer.vocab_size:,}, {first.model.num_layers} layers with heads of "
        f"width {HEAD_WIDTH}, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: mean and standard deviation. The text is "
        f"{corpus_name(first)}, in rows of {first.sequence_length} tokens. The findings hold at "
        "this scale only."
    )
    header = ["width", "recipe", "FLOPs", "steps", "batch size", "learning rate", "loss"]
    parts = [scale, markdown_table(header, rows)]
    sizes = {each.batch_size for runs in experiments.values() for each in runs}
    if len(sizes) > 1:
        parts.append(
            "Not all sizes have the same batch size, so the loss falls along a frontier by more "
            "than compute."
        )
    return "\n\n".join(parts)


def describe_factors(
    widths: Sequence[int], old: np.ndarray, factors: Sequence[Factor]
) -> str:  # old: [widths, seeds]
    """Return the factors as Markdown, with the points between which they are read off."""
    seeds = old.shape[1]
    spread = "95% interval" if seeds >= MIN_SEEDS else "range"
    rows, wide = [], []
    for width, loss, factor in zip(widths[1:], old.mean(axis=1)[1:], factors, strict=True):
        over_seeds = f"{factor.low:.2f} to {factor.high:.2f}" if seeds > 1 else "one seed"
        between = f"{factor.first:.3g} and {factor.last:.3g}"
        rows.append([str(width), f"{loss:.4f}", f"{factor.value:.2f}", over_seeds, between])
        if factor.last > WIDE_SEGMENT * factor.first:
            wide.append(f"{factor.last / factor.first:.0f}-fold apart at width {width}")
    finding = (
        f"How much more compute `{OLD}` needs than `{NEW}` for the loss that it has at a width, "
        f"read off the straight line between two points of `{NEW}` in the figure, with the "
        f"{spread} over resampled seeds:"
    )
    header = ["width", "loss", "factor", spread, f"FLOPs of the two points of `{NEW}`"]
    parts = [finding, markdown_table(header, rows)]
    if wide:
        parts.append(
            f"The two points are {', '.join(wide)}: no run lies between them, so the factor there "
            "is that of a straight line, not a measured one."
        )
    return "\n\n".join(parts)


def describe_changes(
    runs: Mapping[str, Sequence[SweepRun]], results: Mapping[str, RunResult]
) -> str:
    """Return the table of one change at a time as Markdown; `runs` has those of each recipe."""
    first = runs[OLD][0].experiment
    sizes = {each.experiment.batch_size for of_name in runs.values() for each in of_name}
    rows, base = [], math.nan
    for name, of_name in runs.items():
        losses = np.array([results[run.name].value for run in of_name])
        mean, deviation = mean_and_deviation(losses)
        base = mean if name == OLD else base
        steps = f"{of_name[0].experiment.steps:,}"
        rows.append([name, steps, f"{mean:.4f}", f"{deviation:.4f}", f"{mean - base:+.4f}"])
    alone = (
        f"One change at a time at width {first.model.d_model}, a batch size of "
        f"{' or '.join(map(str, sorted(sizes)))} and the learning rate of `{OLD}`:"
    )
    header = ["recipe", "steps", "loss", "spread", "change"]
    return "\n\n".join([alone, markdown_table(header, rows)])


def main(
    widths: tuple[int, ...] = (64, 112, 160, 208, 352),
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    seeds: int = 3,
    tokens_per_parameter: float = 10,
    change_width: int = 112,
    vocab_size: int = 1024,
    depth: int = 2,
    data: Path | None = None,
    workdir: Path = Path("runs/versus"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write versus.md, versus.json and versus.png."""
    ratio = tokens_per_parameter

    records = open_records("versus", output)

    def train_runs(part: str, runs: Sequence[SweepRun]) -> dict[str, RunResult]:
        # Parts share runs: the best of the tuning are the first seeds of the frontiers.
        return train_all(runs, workdir / part, records, processes=processes, minutes=minutes)

    tuning = [
        single_run(
            f"{recipe},width={width},rate={rate:g}",
            {"recipe": recipe, "width": str(width), "rate": f"{rate:g}"},
            sized(recipe, width, rate, ratio, vocab_size=vocab_size, depth=depth, data=data),
        )
        for width in widths[:2]
        for recipe in (OLD, NEW)
        for rate in rates
    ]
    tuned = train_runs("rates", tuning)
    chosen = tuned_rates(tuning, tuned, widths)

    def named(recipe: str, width: int, seed: int, rate: float) -> SweepRun:
        settings = {"recipe": recipe, "width": str(width)}
        experiment = sized(recipe, width, rate, ratio, seed, vocab_size, depth, data)
        return single_run(f"{recipe},width={width},seed={seed}", settings, experiment)

    frontier = [
        named(recipe, width, seed, chosen[recipe][width])
        for width in widths
        for seed in range(seeds)
        for recipe in (OLD, NEW)
    ]
    found = train_runs("frontiers", frontier)
    experiments: dict[str, list[Experiment]] = {OLD: [], NEW: []}
    losses: dict[str, list[list[float]]] = {OLD: [], NEW: []}
    for recipe, width in itertools.product((OLD, NEW), widths):
        at = {"recipe": recipe, "width": str(width)}
        of_width = [run for run in frontier if run.settings == at]
        experiments[recipe].append(of_width[0].experiment)
        losses[recipe].append([found[run.name].value for run in of_width])
    frontiers = {
        recipe: Frontier(np.array([compute(each) for each in runs]), np.array(losses[recipe]))
        for recipe, runs in experiments.items()
    }
    draw(frontiers, output / "versus.png")
    factors = compute_factors(frontiers[OLD], frontiers[NEW])

    # All recipes have the old one's learning rate, so a change that allows a higher one gains less.
    rate = chosen[OLD].get(change_width) or chosen[OLD][widths[1]]
    changes = {
        name: [named(name, change_width, seed, rate) for seed in range(seeds)]
        for name in (OLD, *CHANGES, NEW)
    }
    every_change = [run for of_name in changes.values() for run in of_name]
    changed = train_runs("changes", every_change)
    body = "\n\n".join(
        [
            describe_frontiers(experiments, frontiers, ratio),
            describe_factors(widths, frontiers[OLD].losses, factors),
            describe_changes(changes, changed),
        ]
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
    everything = results_by_settings((tuning, tuned), (frontier, found), (every_change, changed))
    write_record(
        "versus",
        "Transformer against Transformer++",
        body,
        plain,
        everything,
        trained_on=records.describe_machines([*tuning, *frontier, *every_change]),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)

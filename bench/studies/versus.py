"""Transformer against Transformer++ at equal compute, and one change at a time.

    python -m bench.studies.versus [--widths 64 96 128 192] [--seeds 3] [--minutes 10]

1. Learning rates: each recipe is tuned on the two smallest widths.
2. Frontiers: each recipe at every width, trained on `tokens_per_parameter` tokens per
   parameter without embeddings. The parameters of both agree within some percent at a width, so
   compute agrees too. Larger widths have the learning rate of the second width times
   sqrt(D2 / D).
3. The factor: how much more compute the older recipe needs for the loss that it reaches at a
   width, by interpolation between the newer one's points. Its interval is over seeds:
   resamples of each recipe's seeds.
4. Changes: the older recipe at one width with each change alone, and with all of them.

The queue resumes: with --minutes the command stops in time, and continues when it is run again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
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


def sized(
    recipe: str,
    width: int,
    rate: float,
    ratio: float,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> Experiment:
    """Return a recipe at a width, with a learning rate and tokens in proportion to parameters."""
    base = EXPERIMENTS[recipe]
    tokenizer = dataclasses.replace(base.text_data.tokenizer, vocab_size=vocab_size)
    data = dataclasses.replace(base.text_data, tokenizer=tokenizer)
    assert isinstance(base.schedule, ScheduleConfig)
    schedule = dataclasses.replace(base.schedule, learning_rate=rate)
    base = dataclasses.replace(base, data=data, schedule=schedule, seed=seed)
    model = model_of_width(base.model, width, RULES)
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


class Factor(NamedTuple):
    """How much more compute the old recipe needs, and the 95% interval over seeds."""

    value: float
    low: float  # NaN with one seed
    high: float


def compute_factors(
    flops: np.ndarray,  # [widths], increasing
    old: np.ndarray,  # [widths, seeds] losses
    new: np.ndarray,  # [widths, seeds]
    *,
    samples: int = 1000,
) -> list[Factor]:  # of every width but the smallest
    """Return how much more compute the old recipe needs for the losses that it reaches.

    The compute of the new recipe is read off the straight lines between its own points, log loss
    over log compute: no law is assumed, which runs of this size need not follow.
    """

    def factors(old: np.ndarray, new: np.ndarray) -> np.ndarray:  # [widths - 1]
        needed = interpolate_compute(flops, new.mean(axis=1), old.mean(axis=1)[1:])
        return flops[1:] / needed

    value, seeds = factors(old, new), old.shape[1]
    if seeds < 2:
        return [Factor(float(each), math.nan, math.nan) for each in value]
    generator = np.random.default_rng(0)
    rows = np.arange(len(flops))[:, None]
    drawn = []
    for _ in range(samples):
        first, second = generator.integers(0, seeds, (2, len(flops), seeds))
        drawn.append(factors(old[rows, first], new[rows, second]))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return [Factor(*map(float, each)) for each in zip(value, low, high, strict=True)]


def interpolate_compute(
    flops: np.ndarray,  # [n], increasing
    losses: np.ndarray,  # [n]
    targets: np.ndarray,  # [m] losses
) -> np.ndarray:  # [m]
    """Return the compute at which a frontier reaches each loss; beyond its ends, along them.

    The frontier is the lowest loss of at most that compute: it never rises.
    """
    x, y = np.log(flops), np.log(np.minimum.accumulate(losses))
    keep = np.append(True, np.diff(y) < 0)
    x, y = x[keep], y[keep]
    if len(x) < 2:
        return np.full(len(targets), math.nan)
    wanted = np.log(targets)
    segment = np.clip(np.searchsorted(-y, -wanted) - 1, 0, len(x) - 2)
    slope = (y[segment + 1] - y[segment]) / (x[segment + 1] - x[segment])
    compute: np.ndarray = np.exp(x[segment] + (wanted - y[segment]) / slope)
    return compute


def draw(flops: np.ndarray, losses: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw both frontiers: loss over compute, every seed and the mean."""
    figure = Figure(figsize=(6.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, (recipe, values) in enumerate(losses.items()):
        axes.loglog(flops, values.mean(axis=1), "o-", color=f"C{number}", ms=4, label=recipe)
        axes.loglog(flops, values, ".", color=f"C{number}", ms=3, alpha=0.5)
    axes.set(xlabel="training compute 6 N D (FLOPs)", ylabel="held-out loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(visible=True, which="both", alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def describe(
    widths: Sequence[int],
    flops: np.ndarray,  # [widths]
    losses: Mapping[str, np.ndarray],  # [widths, seeds]
    rates: Mapping[str, Mapping[int, float]],
    factors: Sequence[Factor],
    names: Sequence[str],
    change_width: int,
    changed: Mapping[str, RunResult],
    ratio: float,
    vocab_size: int,
) -> str:
    """Return the findings as Markdown, with the scale at which they hold."""
    largest = math.sqrt(float(flops[-1]) / FLOPS_PER_PARAMETER_AND_TOKEN / ratio)  # D is ratio N
    ddof = 1 if losses[OLD].shape[1] > 1 else 0
    header = ["width", "FLOPs", *(f"rate of {name}" for name in losses), *losses]
    rows = []
    for index, width in enumerate(widths):
        of_width = [each[index] for each in losses.values()]
        found = [f"{each.mean():.4f} ± {each.std(ddof=ddof):.4f}" for each in of_width]
        chosen = [f"{rates[name][width]:.2g}" for name in losses]
        rows.append([str(width), f"{flops[index]:.2e}", *chosen, *found])
    seeds = range(losses[OLD].shape[1])
    ablation, base = [], math.nan
    for name in names:
        run_names = [f"{name},width={change_width},seed={seed}" for seed in seeds]
        of_name = np.array([changed[each].value for each in run_names])
        base = float(of_name.mean()) if name == OLD else base
        found = [f"{of_name.mean():.4f}", f"{of_name.std(ddof=ddof):.4f}"]
        ablation.append([name, *found, f"{of_name.mean() - base:+.4f}"])
    scale = (
        f"Held-out loss (nats per token) of models of up to {largest:,.0f} parameters without "
        f"embeddings, {ratio:g} tokens for each, a vocabulary of {vocab_size:,}, {len(seeds)} "
        "seeds: mean and standard deviation. The findings hold at this scale only."
    )
    needed = []
    for width, factor in zip(widths[1:], factors, strict=True):
        old = losses[OLD].mean(axis=1)[list(widths).index(width)]
        interval = f"{factor.low:.2f} to {factor.high:.2f}" if len(seeds) > 1 else "one seed"
        needed.append([str(width), f"{old:.4f}", f"{factor.value:.2f}", interval])
    finding = (
        f"How much more compute `{OLD}` needs than `{NEW}` for the loss that it has at a width, "
        "read off the lines between the points of the figure, with a 95% interval over resampled "
        "seeds:"
    )
    table = markdown_table(["width", "loss", "factor", "95% interval"], needed)
    alone = f"One change at a time at width {change_width}, with the learning rate of `{OLD}`:"
    parts = [scale, markdown_table(header, rows), finding, table, alone]
    return "\n\n".join([*parts, markdown_table(["recipe", "loss", "spread", "change"], ablation)])


def main(
    widths: tuple[int, ...] = (64, 96, 128, 192),
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3),
    seeds: int = 3,
    tokens_per_parameter: float = 20,
    change_width: int = 96,
    vocab_size: int = VOCAB_SIZE,
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
            sized(recipe, width, rate, ratio, vocab_size=vocab_size),
        )
        for width in widths[:2]
        for recipe in (OLD, NEW)
        for rate in rates
    ]
    tuned = train_runs("rates", tuning)
    chosen = tuned_rates(tuning, tuned, widths)

    def named(recipe: str, width: int, seed: int, rate: float) -> SweepRun:
        settings = {"recipe": recipe, "width": str(width)}
        experiment = sized(recipe, width, rate, ratio, seed, vocab_size)
        return single_run(f"{recipe},width={width},seed={seed}", settings, experiment)

    frontier = [
        named(recipe, width, seed, chosen[recipe][width])
        for width in widths
        for seed in range(seeds)
        for recipe in (OLD, NEW)
    ]
    rates_found = train_runs("frontiers", frontier)
    losses = {
        recipe: np.array(
            [
                [rates_found[f"{recipe},width={width},seed={seed}"].value for seed in range(seeds)]
                for width in widths
            ]
        )
        for recipe in (OLD, NEW)
    }
    by_width = {run.settings["width"]: run for run in frontier if run.settings["recipe"] == NEW}
    flops = np.array([compute(by_width[str(width)].experiment) for width in widths])
    draw(flops, losses, output / "versus.png")
    factors = compute_factors(flops, losses[OLD], losses[NEW])

    # All recipes have the old one's learning rate, so a change that allows a higher one gains less.
    rate = chosen[OLD].get(change_width) or chosen[OLD][widths[1]]
    names = (OLD, *CHANGES, NEW)
    changes = [named(name, change_width, seed, rate) for name in names for seed in range(seeds)]
    changed = train_runs("changes", changes)
    everything = {**tuned, **rates_found, **changed}
    body = describe(
        widths, flops, losses, chosen, factors, names, change_width, changed, ratio, vocab_size
    )
    data: dict[str, Any] = {
        "widths": widths,
        "flops": flops.tolist(),
        "losses": {name: each.tolist() for name, each in losses.items()},
        "learning_rates": chosen,
        "compute_factors": [
            [value if math.isfinite(value) else None for value in each] for each in factors
        ],
        "changes": {name: each.value for name, each in changed.items()},
    }
    write_record(
        "versus", "Transformer against Transformer++", body, data, everything, folder=output
    )


if __name__ == "__main__":
    run_study(main)

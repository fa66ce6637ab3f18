"""RoPE extended to longer contexts, before and after short fine-tuning.

    python -m bench.context_extension [--steps 600] [--tuning 60] [--seeds 3] [--data DATA]

The quickstart's model, trained on windows of 128 tokens of its text or, with DATA, of WikiText-2;
then its held-out loss over windows 2, 4 and 8 times as long, unchanged and with each extension
rule, without training and after a tenth of the steps at the longer length.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from bench.small_runs import LENGTH, losses_by_position, small, trained, with_mixer
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from transformer import RoPE
from transformer.attention.rope import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    RopeScaling,
    YaRNScaling,
)

FACTORS = (2, 4, 8)


def rules(factor: float) -> dict[str, RopeScaling]:
    """Return every extension rule for a context `factor` times longer."""
    return {
        "none": NoScaling(),
        "linear": LinearScaling(factor),
        "NTK-aware": NTKScaling(factor),
        "YaRN": YaRNScaling(factor, original_max_length=LENGTH, beta_fast=8.0),
        "Llama 3": Llama3Scaling(factor, original_max_length=LENGTH),
    }


def stretched(experiment: Experiment, scaling: RopeScaling, factor: int, tuning: int) -> Experiment:
    """Return the experiment at a longer length: same tokens per step, a fifth of the rate."""
    pattern = with_mixer(experiment.model, position=RoPE(scaling=scaling))
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, layer_pattern=pattern),
        data=dataclasses.replace(experiment.text_data, sequence_length=LENGTH * factor),
        schedule=ScheduleConfig("linear", learning_rate=8e-4, warmup_steps=5, min_lr_ratio=0.0),
        batch_size=max(1, experiment.batch_size // factor),
        steps=tuning,
        seed=experiment.seed + 1,
    )


def measure(
    steps: int, tuning: int, seed: int, data: Path | None
) -> tuple[float, dict[str, list[float]]]:
    """Return the loss at the trained length, and of each rule those of the table's columns."""
    base = small(steps, seed=seed, data=data)
    run = trained(base)
    vocabulary = run.model.config.vocab_size
    losses: dict[str, list[float]] = {rule: [] for rule in rules(1)}
    for factor in FACTORS:
        for rule, scaling in rules(factor).items():
            longer = stretched(base, scaling, factor, tuning)
            config = dataclasses.replace(longer.model, vocab_size=vocabulary)
            tuned = trained(longer, run.params)
            losses[rule] += [
                float(losses_by_position(run, LENGTH * factor, config=config).mean()),
                float(losses_by_position(tuned, LENGTH * factor).mean()),
            ]
    return float(losses_by_position(run, LENGTH).mean()), losses


def main(steps: int = 600, tuning: int = 60, seeds: int = 1, data: Path | None = None) -> None:
    """Print losses before and after fine-tuning, by rule and length.

    Args:
      steps: Steps at the trained length.
      tuning: Steps at each longer length.
      seeds: Number of models; with several, means and standard deviations are printed.
      data: Folder with WikiText-2 in `wikitext-2`; without it, the quickstart's text.
    """
    measured = []
    for seed in range(seeds):
        measured.append(measure(steps, tuning, seed, data))
        print(f"seed {seed}: {measured[-1]}", file=sys.stderr, flush=True)
    own = summary([loss for loss, _ in measured])
    heads = (f"T = {LENGTH * factor}, {when}" for factor in FACTORS for when in ("as is", "tuned"))
    title = f"trained at T = {LENGTH}, where the loss is {own}; {seeds} seeds"
    table = Table("rule", *heads, title=title)
    for rule in rules(1):
        columns = zip(*(losses[rule] for _, losses in measured), strict=True)
        table.add_row(rule, *map(summary, columns))
    Console(width=140).print(table)


def summary(losses: Sequence[float]) -> str:
    """Return the mean, and of several losses their standard deviation."""
    mean = f"{statistics.mean(losses):.3f}"
    return mean if len(losses) == 1 else f"{mean} ± {statistics.stdev(losses):.3f}"


if __name__ == "__main__":
    tyro.cli(main)

"""RoPE extended to longer contexts, before and after short fine-tuning.

    python -m bench.context_extension [--steps 600] [--tuning 60]

The quickstart's model, trained on windows of 128 tokens; then its held-out loss over windows 2, 4
and 8 times as long, unchanged and with each extension rule, without training and after a tenth of
the steps at the longer length.
"""

import dataclasses

import tyro
from rich.console import Console
from rich.table import Table

from bench.small_runs import LENGTH, losses_by_position, small, trained, with_mixer
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from transformer import RoPE
from transformer.attention.rope_scaling import (
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
        seed=1,
    )


def main(steps: int = 600, tuning: int = 60) -> None:
    """Print losses before and after fine-tuning, by rule and length."""
    base = small(steps)
    run = trained(base)
    own = losses_by_position(run, LENGTH).mean()
    heads = (f"T = {LENGTH * factor}, {when}" for factor in FACTORS for when in ("as is", "tuned"))
    table = Table("rule", *heads, title=f"trained at T = {LENGTH}, where the loss is {own:.3f}")
    for rule in rules(1):
        cells = []
        for factor in FACTORS:
            longer = stretched(base, rules(factor)[rule], factor, tuning)
            vocabulary = run.model.config.vocab_size
            config = dataclasses.replace(longer.model, vocab_size=vocabulary)
            before = losses_by_position(run, LENGTH * factor, config=config).mean()
            tuned = trained(longer, run.params)
            after = losses_by_position(tuned, LENGTH * factor).mean()
            cells += [f"{before:.3f}", f"{after:.3f}"]
        table.add_row(rule, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    tyro.cli(main)

"""Rules of a scaling sweep: how the learning rate follows the width of a model.

Imports no JAX: the command line reads the rules for its help.
"""

import dataclasses
import math
from typing import Literal

from train.errors import UsageError
from train.experiment import Experiment
from train.optim.elementwise import Adam, AdamW
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from transformer.config import TransformerConfig

LearningRateRule = Literal["auto", "mup", "inverse_sqrt_width", "constant"]
"""Learning rate at width D, from lr0 at width D0.

`mup` (Yang et al. 2022, table 8; adam and adamw): hidden matrices have lr0 D0 / D and start with
a standard deviation of 1 / sqrt(fan-in), logits are multiplied by D0 / D, and all other weights
have lr0. `inverse_sqrt_width`: lr0 sqrt(D0 / D). `constant`: lr0. `auto`: `mup` for adam and adamw,
`constant` for muon, whose updates have the same size at every width, `inverse_sqrt_width` for
others.
"""


@dataclasses.dataclass(frozen=True)
class SizeRules:
    """Rules that turn a size and a number of tokens into an experiment."""

    lr_rule: LearningRateRule = "auto"
    aspect_ratio: float = 0.0
    """D / L; 0: that of the config."""
    min_steps: int = 100
    """Steps below which a run has smaller batches."""


def with_learning_rate(
    base: Experiment, model: TransformerConfig, rule: LearningRateRule
) -> Experiment:
    """Return the experiment of a model, with the learning rate of a rule.

    Raises:
      UsageError: The rule does not suit the optimizer or the schedule.
    """
    optimizer, schedule = base.optimizer, base.schedule
    if not isinstance(schedule, ScheduleConfig) or not schedule.learning_rate:
        raise UsageError(
            "scaling: the rules change schedule.learning_rate, and the schedule of "
            f"{base.name} has none; give --schedule.learning-rate"
        )
    ratio, rule = base.model.d_model / model.d_model, resolve_rule(rule, base)
    if rule == "mup":
        if not isinstance(optimizer, Adam | AdamW):
            raise UsageError(
                f"--lr-rule mup: is for adam and adamw, not for {optimizer.kind}; give "
                "--optimizer.kind adamw, or another rule"
            )
        factor = optimizer.matrix_lr_factor * ratio
        optimizer = dataclasses.replace(optimizer, matrix_lr_factor=factor)
        initialization = dataclasses.replace(model.initialization, std=0.0)  # by fan-in
        model = dataclasses.replace(
            model, logit_scale=model.logit_scale * ratio, initialization=initialization
        )
    elif rule == "inverse_sqrt_width":
        rate = schedule.learning_rate * math.sqrt(ratio)
        schedule = dataclasses.replace(schedule, learning_rate=rate)
    return dataclasses.replace(base, model=model, optimizer=optimizer, schedule=schedule)


def resolve_rule(rule: LearningRateRule, base: Experiment) -> LearningRateRule:
    """Return what the rule `auto` is for the optimizer of an experiment."""
    if rule != "auto":
        return rule
    if isinstance(base.optimizer, Adam | AdamW):
        return "mup"
    return "constant" if isinstance(base.optimizer, Muon) else "inverse_sqrt_width"

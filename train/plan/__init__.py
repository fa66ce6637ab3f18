"""Will it fit, how fast, and at what cost: a training step for hardware that is not here."""

from train.plan.plan import Options, Plan, plan
from train.plan.target import Target, parse_target

__all__ = ["Options", "Plan", "Target", "parse_target", "plan"]

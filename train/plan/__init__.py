"""Will it fit, how fast, and at what cost: a training step for hardware that is not here."""

from train.plan.plan import Plan, PlanOptions, make_plan
from train.plan.target import Target, parse_target

__all__ = ["PlanOptions", "Plan", "Target", "parse_target", "make_plan"]

"""The experiment in other precisions: what each would take, if its rounding is accepted."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from train.experiment import Experiment
from train.plan.chips import Chip
from train.plan.published import expect_step
from train.plan.quantities import Quantities
from train.plan.search import RankedCandidate
from train.plan.target import Target
from transformer.precision import POLICIES, Precision


class PrecisionOption(NamedTuple):
    """A way of training in some precision."""

    precision: Precision
    best: RankedCandidate

    def flags(self) -> str:
        """What to give `fit`."""
        return f"--model.precision {self.precision.name} {self.best.candidate.flags()}"

    def as_dict(self, chip: Chip) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        time = self.best.time
        likely = expect_step(chip, time.step_seconds, time.mfu)
        return {
            "fits": self.best.fits,
            "memory_bytes_per_chip": self.best.estimate_footprint.total,
            "step_seconds": likely.seconds,
            "step_seconds_bound": time.step_seconds,
            "mfu": likely.mfu,
            "mfu_bound": time.mfu,
            "flags": self.flags(),
        }


def narrower_precisions(own: Precision, chip: Chip) -> list[Precision]:
    """The named policies that are sensible on a chip and in no part wider than one's own.

    float16 has fewer exponents than bfloat16, and needs its loss scaled: it is sensible only where
    its products are far faster, as on GPUs older than bfloat16.
    """
    quick = chip.peak_flops_per_second("float16") > 2 * chip.peak_flops_per_second("bfloat16")
    return [
        policy
        for policy in POLICIES.values()
        if policy != own and not _wider(policy, own) and (quick or not policy.needs_loss_scale)
    ]


def best_by_precision(
    experiment: Experiment, target: Target, find: Callable[[Quantities], list[RankedCandidate]]
) -> Iterator[PrecisionOption]:
    """The best that is found in each of the other precisions."""
    for precision in narrower_precisions(experiment.model.precision, target.chip):
        quantities = Quantities.from_experiment(replace_precision(experiment, precision), target)
        yield PrecisionOption(precision, find(quantities)[0])


def replace_precision(experiment: Experiment, precision: Precision) -> Experiment:
    """The experiment with another policy."""
    model = dataclasses.replace(experiment.model, precision=precision)
    return dataclasses.replace(experiment, model=model)


def _wider(policy: Precision, own: Precision) -> bool:
    """Whether some part has more bytes than one's own."""
    return any(
        jnp.dtype(getattr(policy, field.name)).itemsize
        > jnp.dtype(getattr(own, field.name)).itemsize
        for field in dataclasses.fields(Precision)
    )

"""The experiment in other precisions: what each would take, if its rounding is accepted."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from train.experiment import Experiment
from train.plan.chips import Chip
from train.plan.published import expected
from train.plan.quantities import Quantities
from train.plan.search import Ranked
from train.plan.target import Target
from transformer.precision import POLICIES, Precision


class InPrecision(NamedTuple):
    """A way of training in some precision."""

    precision: Precision
    best: Ranked

    def flags(self) -> str:
        """What to give `fit`."""
        return f"--model.precision {self.precision.name} {self.best.candidate.flags()}"

    def as_dict(self, chip: Chip) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        time = self.best.time
        likely = expected(chip, time.step, time.mfu)
        return {
            "fits": self.best.fits,
            "memory_bytes_per_chip": self.best.footprint.total,
            "step_seconds": likely.seconds,
            "step_seconds_bound": time.step,
            "mfu": likely.mfu,
            "mfu_bound": time.mfu,
            "flags": self.flags(),
        }


def others(own: Precision, chip: Chip) -> list[Precision]:
    """The named policies that are sensible on a chip and in no part wider than one's own.

    float16 has fewer exponents than bfloat16, and needs its loss scaled: it is sensible only where
    its products are far faster, as on GPUs older than bfloat16.
    """
    quick = chip.peak("float16") > 2 * chip.peak("bfloat16")
    return [
        policy
        for policy in POLICIES.values()
        if policy != own and not _wider(policy, own) and (quick or not policy.needs_loss_scale)
    ]


def alternatives(
    experiment: Experiment, target: Target, find: Callable[[Quantities], list[Ranked]]
) -> Iterator[InPrecision]:
    """The best that is found in each of the other precisions."""
    for precision in others(experiment.model.precision, target.chip):
        quantities = Quantities.of(in_precision(experiment, precision), target)
        yield InPrecision(precision, find(quantities)[0])


def in_precision(experiment: Experiment, precision: Precision) -> Experiment:
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

"""Changes of settings that make a step fit: mesh, rematerialization, microbatches, precision."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from train.errors import UsageError, UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.candidate import Candidate, mesh_sizes
from train.estimate.chips import Chip
from train.estimate.description_tables import format_bytes
from train.estimate.expected_time import expect_step
from train.estimate.footprint import Footprint
from train.estimate.quantities import Quantities
from train.estimate.search import RankedCandidate, rank_candidate, search_candidates
from train.estimate.target import Target
from train.experiment import Experiment
from transformer.precision import POLICIES, Precision


class PrecisionOption(NamedTuple):
    """A precision policy with its best candidate."""

    precision: Precision
    best: RankedCandidate

    def flags(self) -> str:
        """Return the flags of `fit` for this option."""
        return f"--model.precision {self.precision.name} {self.best.candidate.flags()}"

    def as_dict(self, chip: Chip) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        time = self.best.time
        likely = expect_step(chip, time.step_seconds, time.mfu)
        return {
            "fits": self.best.fits,
            "memory_bytes_per_chip": self.best.footprint.total,
            "step_seconds": likely.seconds,
            "step_seconds_bound": time.step_seconds,
            "mfu": likely.mfu,
            "mfu_bound": time.mfu,
            "flags": self.flags(),
        }


def narrower_precisions(own: Precision, chip: Chip) -> list[Precision]:
    """Return the named policies that suit a chip and have no dtype wider than `own`.

    float16 has less range than bfloat16 and needs loss scaling. It is included only if it is more
    than twice as fast, as on GPUs without bfloat16.
    """
    fast_float16 = chip.peak_flops_per_second("float16") > 2 * chip.peak_flops_per_second(
        "bfloat16"
    )
    return [
        policy
        for policy in POLICIES.values()
        if policy != own
        and not _wider(policy, own)
        and (fast_float16 or not policy.needs_loss_scale)
    ]


def best_by_precision(
    experiment: Experiment, target: Target, find: Callable[[Quantities], list[RankedCandidate]]
) -> Iterator[PrecisionOption]:
    """Yield the best candidate in each narrower precision."""
    for precision in narrower_precisions(experiment.model.precision, target.chip):
        quantities = Quantities.from_experiment(replace_precision(experiment, precision), target)
        yield PrecisionOption(precision, find(quantities)[0])


def replace_precision(experiment: Experiment, precision: Precision) -> Experiment:
    """Return the experiment with another precision policy."""
    model = dataclasses.replace(experiment.model, precision=precision)
    return dataclasses.replace(experiment, model=model)


def _wider(policy: Precision, own: Precision) -> bool:
    """Return True if some dtype of the policy has more bytes than in `own`."""
    return any(
        jnp.dtype(getattr(policy, field.name)).itemsize
        > jnp.dtype(getattr(own, field.name)).itemsize
        for field in dataclasses.fields(Precision)
        if field.name != "cache"  # training has no cache
    )


MAX_SUGGESTIONS = 3
"""Number of remedies, and of memory items, that a message names."""


PRECISION_SETTING = "model.precision"
"""The one setting of a remedy that changes training results."""


def plan_remedies(experiment: Experiment, target: Target) -> list[str]:
    """Return the largest memory items of the step and the cheapest settings that fit, as texts.

    Empty if the estimates do not apply to this model, or say that the step fits.
    """
    try:
        experiment = resolve_sizes(experiment)[0]
        now = _current(experiment, target)
        if now.best.fits:
            return []
        fitting = list(_fitting(experiment, target))
    # This runs while an out-of-memory error is reported: a failing estimate must not replace it.
    except (UserError, UsageError, ValueError):
        return []
    changes = [describe_change(now, each) for each in cheapest_changes(now, fitting)]
    smaller = (
        "no setting that keeps the model makes it fit; lower model.d_model or model.num_layers"
    )
    remedy = f"give {changes[0]}" if changes else smaller
    return [f"largest are {largest_parts(now.best.footprint)}; {remedy}", *changes[1:]]


def _current(experiment: Experiment, target: Target) -> PrecisionOption:
    """Return the experiment's own settings with their estimates."""
    quantities = Quantities.from_experiment(experiment, target)
    candidate = Candidate.from_experiment(experiment, target.num_devices)
    return PrecisionOption(experiment.model.precision, rank_candidate(quantities, candidate))


def _fitting(experiment: Experiment, target: Target) -> Iterator[PrecisionOption]:
    """Yield every candidate that fits: the own precision first, the fastest first in each."""
    own = experiment.model.precision
    for precision in (own, *narrower_precisions(own, target.chip)):
        quantities = Quantities.from_experiment(replace_precision(experiment, precision), target)
        yield from (
            PrecisionOption(precision, each) for each in search_candidates(quantities) if each.fits
        )


def cheapest_changes(now: PrecisionOption, fitting: list[PrecisionOption]) -> list[PrecisionOption]:
    """Return the fastest option of each set of changed settings, sets with fewer settings first.

    Precision counts as two settings, since it changes training results.
    """
    by_settings: dict[frozenset[str], PrecisionOption] = {}
    for each in fitting:  # each precision's candidates come fastest first
        by_settings.setdefault(_changed_settings(now, each), each)

    def cost(names: frozenset[str]) -> tuple[int, float]:
        return len(names) + (PRECISION_SETTING in names), by_settings[names].best.time.step_seconds

    return [by_settings[names] for names in sorted(by_settings, key=cost)[:MAX_SUGGESTIONS]]


def describe_change(now: PrecisionOption, new: PrecisionOption) -> str:
    """Return the flags of a change and its effect on step time."""
    cost = new.best.time.step_seconds / now.best.time.step_seconds - 1
    rounding = "" if new.precision == now.precision else ", lower precision"
    return f"{changed_flags(now, new)} ({cost:+.0%} time by estimate{rounding})"


def changed_flags(old: PrecisionOption, new: PrecisionOption) -> str:
    """Return the flags that change one option into the other."""
    settings, names = _settings(new), _changed_settings(old, new)
    return " ".join(f"--{name} {settings[name]}" for name in settings if name in names)


def largest_parts(size: Footprint) -> str:
    """Return the largest memory items as text."""
    parts = {
        "weights": size.weights,
        "the optimizer's state": size.optimizer,
        "gradients": size.gradients,
        "residuals of the forward pass": size.residuals,
        "the working set of a layer or the loss": size.working_set,
    }
    ordered = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} ({format_bytes(parts[name])})" for name in ordered[:MAX_SUGGESTIONS])


def _settings(option: PrecisionOption) -> dict[str, object]:
    candidate = option.best.candidate
    return {
        **{f"mesh.{axis}": size for axis, size in mesh_sizes(candidate.mesh).items()},
        "grad-accum-steps": candidate.grad_accum_steps,
        "model.remat": candidate.remat,
        PRECISION_SETTING: option.precision.name,
    }


def _changed_settings(old: PrecisionOption, new: PrecisionOption) -> frozenset[str]:
    before, after = _settings(old), _settings(new)
    return frozenset(name for name in after if after[name] != before[name])

"""The experiment in other precisions: what each would take, if its rounding is accepted.

What would make a step fit that ran out of memory, by the same estimates as a plan's.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from train.errors import UsageError, UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.candidate import Candidate, mesh_sizes
from train.estimate.chips import Chip
from train.estimate.footprint import Footprint
from train.estimate.memory_tables import format_bytes
from train.estimate.published import expect_step
from train.estimate.quantities import Quantities
from train.estimate.search import RankedCandidate, rank_candidate, search_candidates
from train.estimate.target import Target
from train.experiment import Experiment
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
            "memory_bytes_per_chip": self.best.footprint.total,
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


MAX_SUGGESTIONS = 3


PRECISION_SETTING = "model.precision"
"""The setting that changes what is learnt."""


def suggest_remedies(experiment: Experiment, target: Target) -> list[str]:
    """The largest parts of the step as it is, and the cheapest changes of settings that fit.

    Nothing if the estimates cannot tell: the model is no such as they know, or they say that it
    fits.
    """
    try:
        experiment = resolve_sizes(experiment)[0]
        now = _as_it_is(experiment, target)
        if now.best.fits:
            return []
        fitting = list(_fitting(experiment, target))
    except (UserError, UsageError, ValueError):
        return []
    said = [describe_change(now, each) for each in cheapest_changes(now, fitting)]
    smaller = "nothing that leaves the model as it is makes it fit; lower model.d_model or model.num_layers"
    given = f"give {said[0]}" if said else smaller
    return [f"largest are {largest_parts(now.best.footprint)}; {given}", *said[1:]]


def _as_it_is(experiment: Experiment, target: Target) -> PrecisionOption:
    quantities = Quantities.from_experiment(experiment, target)
    candidate = Candidate.from_experiment(experiment, target.num_chips)
    return PrecisionOption(experiment.model.precision, rank_candidate(quantities, candidate))


def _fitting(experiment: Experiment, target: Target) -> Iterator[PrecisionOption]:
    """All that fits: the own precision first, and in each the fastest."""
    own = experiment.model.precision
    for precision in (own, *narrower_precisions(own, target.chip)):
        quantities = Quantities.from_experiment(replace_precision(experiment, precision), target)
        yield from (
            PrecisionOption(precision, each) for each in search_candidates(quantities) if each.fits
        )


def cheapest_changes(now: PrecisionOption, fitting: list[PrecisionOption]) -> list[PrecisionOption]:
    """The fastest of each kind of change, those that change fewest settings first.

    Another precision, which changes what is learnt, counts as two settings.
    """
    kinds: dict[frozenset[str], PrecisionOption] = {}
    for each in fitting:  # the fastest come first
        kinds.setdefault(_different(now, each), each)

    def cost(names: frozenset[str]) -> tuple[int, float]:
        return len(names) + (PRECISION_SETTING in names), kinds[names].best.time.step_seconds

    return [kinds[names] for names in sorted(kinds, key=cost)[:MAX_SUGGESTIONS]]


def describe_change(now: PrecisionOption, new: PrecisionOption) -> str:
    """A change with what it costs."""
    cost = new.best.time.step_seconds / now.best.time.step_seconds - 1
    rounding = "" if new.precision == now.precision else ", rounds more"
    return f"{changed_flags(now, new)} ({cost:+.0%} time by estimate{rounding})"


def changed_flags(old: PrecisionOption, new: PrecisionOption) -> str:
    """The flags that lead from one to the other."""
    settings, names = _settings(new), _different(old, new)
    return " ".join(f"--{name} {settings[name]}" for name in settings if name in names)


def largest_parts(size: Footprint) -> str:
    """The three largest parts."""
    parts = {
        "weights": size.weights,
        "the optimizer's state": size.optimizer,
        "gradients": size.gradients,
        "what is kept for the backward pass": size.residuals,
        "the layer or loss under way": size.working_set,
    }
    ordered = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} ({format_bytes(parts[name])})" for name in ordered[:MAX_SUGGESTIONS])


def _settings(way: PrecisionOption) -> dict[str, object]:
    candidate = way.best.candidate
    return {
        **{f"mesh.{axis}": size for axis, size in mesh_sizes(candidate.mesh).items()},
        "grad-accum-steps": candidate.grad_accum_steps,
        "model.remat": candidate.remat,
        PRECISION_SETTING: way.precision.name,
    }


def _different(old: PrecisionOption, new: PrecisionOption) -> frozenset[str]:
    before, after = _settings(old), _settings(new)
    return frozenset(name for name in after if after[name] != before[name])

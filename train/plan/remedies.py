"""What would make a step fit that ran out of memory, by the same estimates as a plan's."""

from collections.abc import Iterator

from train.describe.layout import format_bytes
from train.describe.shape import resolve_sizes
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.plan.candidate import Candidate, mesh_sizes
from train.plan.footprint import Footprint
from train.plan.precisions import PrecisionOption, narrower_precisions, replace_precision
from train.plan.quantities import Quantities
from train.plan.search import rank_candidate, search_candidates
from train.plan.target import Target

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
    smaller = (
        "nothing that leaves the model as it is makes it fit; lower model.width or model.layers"
    )
    given = f"give {said[0]}" if said else smaller
    return [f"largest are {largest_parts(now.best.estimate_footprint)}; {given}", *said[1:]]


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
        "accumulate": candidate.grad_accum_steps,
        "model.remat": candidate.remat,
        PRECISION_SETTING: way.precision.name,
    }


def _different(old: PrecisionOption, new: PrecisionOption) -> frozenset[str]:
    before, after = _settings(old), _settings(new)
    return frozenset(name for name in after if after[name] != before[name])

"""What would make a step fit that ran out of memory, by the same estimates as a plan's."""

from collections.abc import Iterator

from train.describe.layout import in_bytes
from train.describe.shape import with_sizes
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.plan.candidate import Candidate, sizes_of
from train.plan.footprint import Footprint
from train.plan.precisions import InPrecision, in_precision, others
from train.plan.quantities import Quantities
from train.plan.search import ranked, search
from train.plan.target import Target

COUNT = 3

PRECISION = "model.precision"
"""The setting that changes what is learnt."""


def remedies(experiment: Experiment, target: Target) -> list[str]:
    """The largest parts of the step as it is, and the cheapest changes of settings that fit.

    Nothing if the estimates cannot tell: the model is no such as they know, or they say that it
    fits.
    """
    try:
        experiment = with_sizes(experiment)[0]
        now = _as_it_is(experiment, target)
        if now.best.fits:
            return []
        fitting = list(_fitting(experiment, target))
    except (UserError, UsageError, ValueError):
        return []
    said = [told(now, each) for each in cheapest(now, fitting)]
    smaller = (
        "nothing that leaves the model as it is makes it fit; lower model.width or model.layers"
    )
    given = f"give {said[0]}" if said else smaller
    return [f"largest are {largest(now.best.footprint)}; {given}", *said[1:]]


def _as_it_is(experiment: Experiment, target: Target) -> InPrecision:
    quantities = Quantities.of(experiment, target)
    candidate = Candidate.of(experiment, target.count)
    return InPrecision(experiment.model.precision, ranked(quantities, candidate))


def _fitting(experiment: Experiment, target: Target) -> Iterator[InPrecision]:
    """All that fits: the own precision first, and in each the fastest."""
    own = experiment.model.precision
    for precision in (own, *others(own, target.chip)):
        quantities = Quantities.of(in_precision(experiment, precision), target)
        yield from (InPrecision(precision, each) for each in search(quantities) if each.fits)


def cheapest(now: InPrecision, fitting: list[InPrecision]) -> list[InPrecision]:
    """The fastest of each kind of change, those that change fewest settings first.

    Another precision, which changes what is learnt, counts as two settings.
    """
    kinds: dict[frozenset[str], InPrecision] = {}
    for each in fitting:  # the fastest come first
        kinds.setdefault(_different(now, each), each)

    def cost(names: frozenset[str]) -> tuple[int, float]:
        return len(names) + (PRECISION in names), kinds[names].best.time.step

    return [kinds[names] for names in sorted(kinds, key=cost)[:COUNT]]


def told(now: InPrecision, new: InPrecision) -> str:
    """A change with what it costs."""
    cost = new.best.time.step / now.best.time.step - 1
    rounding = "" if new.precision == now.precision else ", rounds more"
    return f"{changed(now, new)} ({cost:+.0%} time by estimate{rounding})"


def changed(old: InPrecision, new: InPrecision) -> str:
    """The flags that lead from one to the other."""
    settings, names = _settings(new), _different(old, new)
    return " ".join(f"--{name} {settings[name]}" for name in settings if name in names)


def largest(size: Footprint) -> str:
    """The three largest parts."""
    parts = {
        "weights": size.weights,
        "the optimizer's state": size.optimizer,
        "gradients": size.gradients,
        "what is kept for the backward pass": size.kept,
        "the layer or loss under way": size.working,
    }
    ordered = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} ({in_bytes(parts[name])})" for name in ordered[:COUNT])


def _settings(way: InPrecision) -> dict[str, object]:
    candidate = way.best.candidate
    return {
        **{f"mesh.{axis}": size for axis, size in sizes_of(candidate.mesh).items()},
        "accumulate": candidate.accumulate,
        "model.remat": candidate.remat,
        PRECISION: way.precision.name,
    }


def _different(old: InPrecision, new: InPrecision) -> frozenset[str]:
    before, after = _settings(old), _settings(new)
    return frozenset(name for name in after if after[name] != before[name])

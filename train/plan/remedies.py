"""What would make a step fit that ran out of memory, by the same estimates as a plan's."""

from train.describe.layout import in_bytes
from train.describe.shape import with_sizes
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.plan.candidate import Candidate, sizes_of
from train.plan.footprint import Footprint
from train.plan.quantities import Quantities
from train.plan.search import Ranked, ranked, search
from train.plan.target import Target

COUNT = 3


def remedies(experiment: Experiment, target: Target) -> list[str]:
    """The largest parts of the step as it is, and the cheapest changes of settings that fit.

    Nothing if the estimates cannot tell: the model is no such as they know, or they say that it
    fits.
    """
    try:
        quantities = Quantities.of(with_sizes(experiment)[0], target)
        now = ranked(quantities, Candidate.of(experiment, target.count))
        fitting = [each for each in search(quantities) if each.fits]
    except (UserError, UsageError, ValueError):
        return []
    if now.fits:
        return []
    said = []
    for each in cheapest(now, fitting):
        cost = each.time.step / now.time.step - 1
        said.append(f"{changed(now.candidate, each.candidate)} ({cost:+.0%} time by estimate)")
    given = f"give {said[0]}" if said else "nothing that leaves the model as it is makes it fit"
    return [f"largest are {largest(now.footprint)}; {given}", *said[1:]]


def cheapest(now: Ranked, fitting: list[Ranked]) -> list[Ranked]:
    """The fastest of each kind of change, those that change fewest settings first."""
    kinds: dict[frozenset[str], Ranked] = {}
    for each in fitting:  # the fastest come first
        kinds.setdefault(_different(now.candidate, each.candidate), each)
    ordered = sorted(kinds, key=lambda names: (len(names), kinds[names].time.step))
    return [kinds[names] for names in ordered[:COUNT]]


def changed(old: Candidate, new: Candidate) -> str:
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


def _settings(candidate: Candidate) -> dict[str, object]:
    named: dict[str, object] = {
        f"mesh.{axis}": size for axis, size in sizes_of(candidate.mesh).items()
    }
    return {**named, "accumulate": candidate.accumulate, "model.remat": candidate.remat}


def _different(old: Candidate, new: Candidate) -> frozenset[str]:
    before, after = _settings(old), _settings(new)
    return frozenset(name for name in after if after[name] != before[name])

"""`fit --mesh auto`: the mesh that a plan for the devices that are here would take."""

import dataclasses

from train.choices import with_precision
from train.describe.shape import with_sizes
from train.experiment import Experiment
from train.plan.candidate import Candidate
from train.plan.quantities import Quantities
from train.plan.search import Ranked, search
from train.plan.target import Target


def with_mesh(experiment: Experiment, target: Target) -> tuple[Experiment, Candidate]:
    """The experiment on the fastest mesh that fits with its own other settings.

    If none does, rematerialisation and microbatches are chosen too. Raises UsageError if no mesh
    divides the model.
    """
    quantities = Quantities.of(with_precision(with_sizes(experiment)[0], target.hardware), target)
    best = _best(experiment, search(quantities))
    return dataclasses.replace(
        experiment,
        mesh=best.candidate.mesh,
        accumulate=best.candidate.accumulate,
        model=dataclasses.replace(experiment.model, remat=best.candidate.remat),
    ), best.candidate


def _best(experiment: Experiment, every: list[Ranked]) -> Ranked:
    own = (experiment.model.remat, experiment.accumulate)
    as_asked = [each for each in every if each.candidate[1:] == own and each.fits]
    return (as_asked or every)[0]

"""`fit --mesh auto`: the mesh that a plan for the devices that are here would take."""

import dataclasses

from train.choices import resolve_precision
from train.describe.shape import resolve_sizes
from train.experiment import Experiment
from train.plan.candidate import Candidate
from train.plan.quantities import Quantities
from train.plan.search import RankedCandidate, search_candidates
from train.plan.target import Target


def with_best_mesh(experiment: Experiment, target: Target) -> tuple[Experiment, Candidate]:
    """The experiment on the fastest mesh that fits with its own other settings.

    If none does, rematerialisation and microbatches are chosen too. Raises UsageError if no mesh
    divides the model.
    """
    quantities = Quantities.from_experiment(
        resolve_precision(resolve_sizes(experiment)[0], target.hardware), target
    )
    best = _best(experiment, search_candidates(quantities))
    return dataclasses.replace(
        experiment,
        mesh=best.candidate.mesh,
        grad_accum_steps=best.candidate.grad_accum_steps,
        model=dataclasses.replace(experiment.model, remat=best.candidate.remat),
    ), best.candidate


def _best(experiment: Experiment, every: list[RankedCandidate]) -> RankedCandidate:
    own = (experiment.model.remat, experiment.grad_accum_steps)
    as_asked = [each for each in every if each.candidate[1:] == own and each.fits]
    return (as_asked or every)[0]

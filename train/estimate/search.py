"""Which forms of attention a step takes on its target.

One way of training an experiment on a target: what a search goes through.

Every way of cutting a step for a target, ranked by the estimates.

`fit --mesh auto`: the mesh that a plan for the devices that are here would take.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from train.config.resolve import resolve_precision
from train.errors import UsageError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.candidate import SEARCHED_REMAT, Candidate
from train.estimate.footprint import Footprint, estimate_footprint
from train.estimate.quantities import Quantities
from train.estimate.roofline import StepTime, estimate_step_time
from train.estimate.target import Target
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from transformer.attention.config import AttentionConfig
from transformer.layers.config import MoEConfig

MIN_CONTEXT_PARALLEL_LENGTH = 8192
"""Tokens from which on it is tried to cut sequences."""


MEMORY_MARGIN = 0.05
"""Share of a chip's memory that is left free: the estimate is none too exact."""


class RankedCandidate(NamedTuple):
    """A candidate with its estimates."""

    candidate: Candidate
    footprint: Footprint
    time: StepTime
    fits: bool

    @property
    def sort_key(self) -> tuple[bool, float, float, int]:
        """What fits first: the fastest of it, and of those alike the one with least to overlap.

        Of what does not fit the smallest.
        """
        time, size = self.time, self.footprint.total
        return (
            (False, time.step_seconds, time.sequential_seconds, size)
            if self.fits
            else (True, size, 0.0, 0)
        )


def search_candidates(quantities: Quantities) -> list[RankedCandidate]:
    """All candidates that divide, the best first. Raises UsageError if none does."""
    found, problems = [], []
    asked = quantities.experiment.model.remat
    policies = SEARCHED_REMAT if asked in SEARCHED_REMAT else (*SEARCHED_REMAT, asked)
    for mesh in candidate_meshes(quantities):
        try:
            quantities.state_bytes(mesh)
        except UsageError as error:
            problems.append(str(error))
            continue
        for remat in policies:
            for accumulate in _microbatches(quantities, mesh):
                found.append(rank_candidate(quantities, Candidate(mesh, remat, accumulate)))
    if not found:
        setting, rows = quantities.experiment.row_multiple
        why = problems[0] if problems else f"{setting} {rows}: has too few rows to cut"
        raise UsageError(f"target {quantities.target.name}: no mesh divides the model ({why})")
    return sorted(found, key=lambda each: each.sort_key)


def rank_candidate(quantities: Quantities, candidate: Candidate) -> RankedCandidate:
    """One candidate with its estimates. Raises UsageError if its mesh does not divide the model."""
    size = estimate_footprint(quantities, candidate)
    fits = size.total <= quantities.target.memory_bytes * (1 - MEMORY_MARGIN)
    return RankedCandidate(candidate, size, estimate_step_time(quantities, candidate), fits)


def candidate_meshes(quantities: Quantities) -> Iterator[MeshConfig]:
    """Every mesh over all chips of the target that divides the batch and the heads."""
    count = quantities.target.num_chips
    for tensor in _divisors(count):
        for context in _contexts(quantities, count // tensor):
            for expert in _experts(quantities, count // tensor // context):
                rest = count // (tensor * context * expert)
                for fsdp in _divisors(rest):
                    yield dataclasses.replace(
                        quantities.experiment.mesh,
                        data=rest // fsdp,
                        fsdp=fsdp,
                        tensor=tensor,
                        context=context,
                        expert=expert,
                    )


def _contexts(quantities: Quantities, most: int) -> list[int]:
    """How sequences may be cut: long ones, where attention can go round a ring."""
    model = quantities.experiment.model
    rings = all(isinstance(block.mixer, AttentionConfig) for block in model.layer_pattern)
    if (
        quantities.sequence_length < MIN_CONTEXT_PARALLEL_LENGTH
        or not rings
        or model.encoder is not None
    ):
        return [1]
    return [size for size in _divisors(most) if quantities.sequence_length % (2 * size) == 0]


def _experts(quantities: Quantities, most: int) -> list[int]:
    counts = [
        block.feed_forward.num_experts
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    return [size for size in _divisors(most) if all(count % size == 0 for count in counts or [1])]


def _microbatches(quantities: Quantities, mesh: MeshConfig) -> list[int]:
    """Numbers of microbatches: those that leave every chip whole rows."""
    _, rows = quantities.experiment.row_multiple
    parts = mesh.data * mesh.fsdp * mesh.expert
    if rows % parts:
        return []
    return [count for count in _divisors(rows // parts) if _accumulates(quantities, count)]


def _accumulates(quantities: Quantities, count: int) -> bool:
    """Whether the experiment may be trained in so many microbatches."""
    try:
        dataclasses.replace(quantities.experiment, grad_accum_steps=count)
    except ValueError:
        return False
    except UsageError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


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

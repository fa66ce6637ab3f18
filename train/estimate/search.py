"""Search over meshes, rematerialization policies and microbatches, ranked by the estimates."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from train.config.resolve import resolve_precision
from train.errors import UsageError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.memory import Memory, estimate_memory
from train.estimate.quantities import Candidate, Quantities
from train.estimate.roofline import StepTime, estimate_step_time
from train.estimate.target import Target
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from train.runtime.stages import track
from transformer.attention.full import AttentionConfig
from transformer.layers.moe import MoEConfig
from transformer.models.stack import RematPolicy

SEARCHED_REMAT: tuple[RematPolicy, ...] = ("none", "dots", "full")
"""Rematerialization policies that a search tries, in addition to the experiment's own."""


MIN_CONTEXT_PARALLEL_LENGTH = 8192
"""Sequence length from which on the search tries context parallelism."""


MEMORY_MARGIN = 0.05
"""Fraction of a chip's memory that is left free, since the estimate is not exact."""


class RankedCandidate(NamedTuple):
    """A candidate with its estimates."""

    candidate: Candidate
    memory: Memory
    time: StepTime
    fits: bool

    @property
    def sort_key(self) -> tuple[bool, float, float, int]:
        """Return the key of the ranking: fitting candidates first.

        Fitting candidates are ordered by step time, then by the time without overlap. Others are
        ordered by memory, smallest first.
        """
        time, size = self.time, self.memory.total
        return (
            (False, time.step_seconds, time.sequential_seconds, size)
            if self.fits
            else (True, size, 0.0, 0)
        )


def search_candidates(quantities: Quantities, target: Target) -> list[RankedCandidate]:
    """Return all candidates, best first. Raises UsageError if no mesh divides the model."""
    own = quantities.experiment.model.remat
    policies = SEARCHED_REMAT if own in SEARCHED_REMAT else (*SEARCHED_REMAT, own)
    ranked, problems = [], []
    for mesh in track(list(candidate_meshes(quantities, target)), "estimating meshes"):
        # Shapes alone decide whether the mesh divides the model, so check before any estimate.
        try:
            quantities.state_bytes(mesh)
        except UsageError as error:
            problems.append(str(error))
            continue
        steps = _accumulation_steps(quantities, mesh)
        ranked += [
            rank_candidate(quantities, Candidate(mesh, remat, count), target)
            for remat in policies
            for count in steps
        ]
    if not ranked:
        setting, rows = quantities.experiment.row_multiple
        problems.append(f"{setting} {rows}: has too few rows to divide among the chips")
        raise UsageError(
            f"target {target.name}: no mesh divides the model ({problems[0]}); give another "
            "target, or change the setting that does not divide"
        )
    return sorted(ranked, key=lambda each: each.sort_key)


def rank_candidate(quantities: Quantities, candidate: Candidate, target: Target) -> RankedCandidate:
    """Return a candidate with its estimates.

    Raises UsageError if its mesh does not divide the model.
    """
    memory = estimate_memory(quantities, candidate)
    fits = memory.total <= target.memory_bytes * (1 - MEMORY_MARGIN)
    time = estimate_step_time(quantities, candidate, target)
    return RankedCandidate(candidate, memory, time, fits)


def own_candidate(quantities: Quantities, target: Target) -> list[RankedCandidate]:
    """Return the experiment's own settings as the only candidate."""
    candidate = Candidate.from_experiment(quantities.experiment, target.num_devices)
    return [rank_candidate(quantities, candidate, target)]


def candidate_meshes(quantities: Quantities, target: Target) -> Iterator[MeshConfig]:
    """Yield every mesh over all chips of the target that divides the sequence and the experts."""
    count = target.num_devices
    for tensor in _divisors(count):
        for context in _context_sizes(quantities, count // tensor):
            for expert in _expert_sizes(quantities, count // tensor // context):
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


def _context_sizes(quantities: Quantities, limit: int) -> list[int]:
    """Return the sizes of the `context` axis.

    Only long sequences are split, and only if every mixer is attention, which supports a ring.
    """
    model = quantities.experiment.model
    supports_ring = all(isinstance(block.mixer, AttentionConfig) for block in model.layer_pattern)
    if (
        quantities.sequence_length < MIN_CONTEXT_PARALLEL_LENGTH
        or not supports_ring
        or model.encoder is not None
    ):
        return [1]
    # Zigzag order gives each device an early and a late chunk of the sequence: 2 chunks per device.
    return [size for size in _divisors(limit) if quantities.sequence_length % (2 * size) == 0]


def _expert_sizes(quantities: Quantities, limit: int) -> list[int]:
    """Return the sizes of the `expert` axis: common divisors of the numbers of experts."""
    counts = [
        block.feed_forward.num_experts
        for block in quantities.experiment.model.layer_pattern
        if isinstance(block.feed_forward, MoEConfig)
    ]
    return [size for size in _divisors(limit) if all(count % size == 0 for count in counts or [1])]


def _accumulation_steps(quantities: Quantities, mesh: MeshConfig) -> list[int]:
    """Return the numbers of microbatches that leave every chip whole rows."""
    _, rows = quantities.experiment.row_multiple
    parts = mesh.data * mesh.fsdp * mesh.expert
    if rows % parts:
        return []
    return [count for count in _divisors(rows // parts) if _can_accumulate(quantities, count)]


def _can_accumulate(quantities: Quantities, count: int) -> bool:
    """Return True if the experiment is valid with `count` microbatches."""
    try:
        dataclasses.replace(quantities.experiment, grad_accum_steps=count)
    except (UsageError, ValueError):
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def with_best_mesh(experiment: Experiment, target: Target) -> tuple[Experiment, Candidate]:
    """Return the experiment on the fastest mesh that fits, for `fit --mesh auto`.

    Other settings stay. If no mesh fits with them, rematerialization and microbatches change too.
    Raises UsageError if no mesh divides the model.
    """
    resolved = resolve_precision(resolve_sizes(experiment)[0], target.hardware)
    ranked = search_candidates(Quantities(resolved, target.hardware), target)
    own = (experiment.model.remat, experiment.grad_accum_steps)
    unchanged = [each for each in ranked if each.candidate[1:] == own and each.fits]
    best = (unchanged or ranked)[0].candidate
    return best.apply_to(experiment), best
